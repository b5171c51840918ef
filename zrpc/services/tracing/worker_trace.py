"""What one worker has recorded, and the files in which workers leave that."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zrpc.calls.recorder import (
    CallRecord,
    HandlerRecord,
    MessageRecord,
    Record,
    Recording,
    SpanRecord,
)

logger = logging.getLogger(__name__)

# The ends of the names of a worker's files: while it runs, the older half of that, and when it has
# left the mesh.
RUNNING, OLDER, ENDED = ".running", ".older", ".ended"
_NEW = ".new"
_WRITE_SECONDS = 0.5
_JOIN_SECONDS = 10.0  # the file system may hang
# Faster than json.dumps, which looks at its options first.
_encode = json.JSONEncoder().encode
_TYPES: dict[str, Any] = {
    each.__name__: each for each in (CallRecord, HandlerRecord, MessageRecord, SpanRecord)
}


@dataclass
class WorkerTrace:
    """What one worker has recorded.

    Attributes:
        member: the worker's id.
        name, rank, host, pid: which worker that is.
        names: of all members that it knows, by their ids.
        threads: the names of its threads, by their idents; the main thread is the first.
        dropped: how many of the oldest records were dropped.
        records: the others.
    """

    member: int
    name: str
    rank: int
    host: str
    pid: int
    names: dict[int, str]
    threads: dict[int, str]
    dropped: int = 0
    records: list[Record] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> WorkerTrace:
        """Reads what a `PartWriter` has written; its worker may have been killed meanwhile.

        Raises:
            FileNotFoundError: the worker has written nothing yet.
            ValueError: the file holds something else.
        """
        text = ""
        with contextlib.suppress(FileNotFoundError):  # there is none, or it is being replaced
            text = path.with_suffix(OLDER).read_text()
        text += path.read_text()
        rows: list[Any] = []
        for line in text.splitlines():
            with contextlib.suppress(ValueError):  # a line that was not finished
                rows.append(json.loads(line))
        if not rows:
            raise FileNotFoundError(f"{path} has no lines")
        try:
            worker = [row for row in rows if isinstance(row, dict)][-1]
            records = [_TYPES[row[0]](*row[1:]) for row in rows if not isinstance(row, dict)]
            # The keys of JSON are strings.
            for table in ("names", "threads"):
                worker[table] = {int(key): name for key, name in worker[table].items()}
            return cls(**{**worker, "records": records})
        except (AttributeError, TypeError, LookupError, ValueError) as error:
            raise ValueError(f"expected a worker's trace in {path}: {error!r}") from error


class PartWriter:
    """Writes what a worker records to a file, soon after it happens: the worker may be killed.

    Has a thread of its own, which `close` joins. Two files keep the latest records, a new one and
    an older one.

    Args:
        directory: where.
        recording: what to write.
        capacity: about how many records each file keeps.
        describe: returns the worker, without records.

    Raises:
        OSError: nothing can be written there.
    """

    def __init__(
        self,
        directory: Path,
        recording: Recording,
        capacity: int,
        describe: Callable[[], WorkerTrace],
    ) -> None:
        self._recording = recording
        self._capacity = capacity
        self._describe = describe
        self._lines = self._older_lines = self._dropped = 0
        worker = describe()
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / f"{worker.name}-{worker.member}{RUNNING}"
        for suffix in (RUNNING, OLDER, ENDED, _NEW):  # of an earlier run
            self._path.with_suffix(suffix).unlink(missing_ok=True)
        self._write()
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"zrpc-{worker.name}-trace", daemon=True
        )
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._closing.wait(_WRITE_SECONDS):
                self._write()
        except OSError as error:
            logger.error("%s: the trace ends here: %s", self._path, error)

    def _write(self) -> None:
        records = self._recording.take()
        file_path = self._path
        if self._lines >= self._capacity:
            # A file with this name is always there, for the reader.
            older, file_path = self._path.with_suffix(OLDER), self._path.with_suffix(_NEW)
            older.unlink(missing_ok=True)
            os.link(self._path, older)
            self._dropped += self._older_lines
            self._older_lines, self._lines = self._lines, 0
        self._lines += len(records)
        worker = self._describe()
        worker.dropped = self._recording.dropped + self._dropped
        rows: list[Any] = [[type(each).__name__, *each] for each in records]
        # One by one: other threads can run in between.
        text = [_encode(row) + "\n" for row in [asdict(worker), *rows]]
        file_path.touch(0o600)  # not for other users: it says what the program does
        with file_path.open("a") as file:
            file.writelines(text)
        file_path.replace(self._path)

    def close(self) -> None:
        """Writes the rest, and says by the name of the file that this is all.

        Raises:
            OSError: it can't be written.
        """
        self._closing.set()
        self._thread.join(_JOIN_SECONDS)
        if self._thread.is_alive():
            raise TimeoutError(f"{self._path} can't be written")
        self._write()
        self._path.replace(self._path.with_suffix(ENDED))

"""The workers' output: read from pipes, kept in log files, shown with the rank."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from .console import Console
from .errors import LaunchError
from .lines import LineSplitter

_KEPT = 400  # lines of each worker's standard error kept for a report of its failure
_TRACEBACK = b"Traceback (most recent call last):"
_CHAINED = (b"During handling of the above exception", b"The above exception was the direct cause")


class Output:
    """Carries the output of all workers, with a thread per stream.

    Args:
        console: Where lines are shown.
        log_dir: Where each worker's output is kept as it is, in ``rank0.out`` and
            ``rank0.err``; None to keep none. It is made, and old files in it are replaced.

    Raises:
        LaunchError: The directory can't be made.
    """

    def __init__(self, console: Console, log_dir: Path | None = None) -> None:
        self._console = console
        self._log_dir = log_dir
        self._streams: list[_Stream] = []
        self._begun: set[str] = set()
        self._tails: dict[int, deque[bytes]] = {}
        if log_dir is not None:
            try:
                log_dir.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise LaunchError(
                    f"the log directory {log_dir} can't be made: {error.strerror}"
                ) from error

    def open(self, rank: int) -> tuple[int, int]:
        """Make the pipes of one worker.

        Returns:
            Descriptors for its standard output and error. The caller closes them once the
            worker has its copies.
        """
        tail = self._tails[rank] = deque(maxlen=_KEPT)
        out = self._open(rank, error=False, tail=None)
        return out, self._open(rank, error=True, tail=tail)

    def _open(self, rank: int, *, error: bool, tail: deque[bytes] | None) -> int:
        log: BinaryIO | None = None
        if self._log_dir is not None:
            name = f"rank{rank}.{'err' if error else 'out'}"
            if name not in self._begun:  # of a worker that is started again it goes on
                (self._log_dir / name).write_bytes(b"")
                self._begun.add(name)
            log = open(self._log_dir / name, "ab", buffering=0)  # noqa: SIM115
        reading, writing = os.pipe()
        self._streams.append(_Stream(reading, rank, error, self._console, log, tail))
        return writing

    def last_words(self, rank: int) -> list[bytes]:
        """The traceback that a worker's standard error ended with, or else its last lines."""
        return last_traceback(list(self._tails[rank]))

    def drain(self, timeout: float, give_up: Callable[[], bool] = lambda: False) -> bool:
        """Wait until every stream has ended and was shown.

        Args:
            timeout: Seconds to wait for streams that a stray process holds open. A slow reader
                of our own output doesn't count: it may take as long as it likes.
            give_up: Asked now and then; true ends the wait.

        Returns:
            Whether all have ended.
        """
        deadline = time.monotonic() + timeout
        for stream in self._streams:
            while stream.is_alive():
                stream.join(0.05)
                if self._console.blocked:
                    deadline = time.monotonic() + timeout
                if time.monotonic() > deadline or give_up():
                    return False
        return True


class _Stream(threading.Thread):
    """Reads one pipe until it ends."""

    def __init__(
        self,
        fd: int,
        rank: int,
        error: bool,
        console: Console,
        log: BinaryIO | None,
        tail: deque[bytes] | None,
    ) -> None:
        # A daemon, so that a process that escaped with the pipe can't keep the launcher alive.
        super().__init__(name=f"zrpc-output-{rank}-{'err' if error else 'out'}", daemon=True)
        self._fd = fd
        self._rank = rank
        self._error = error
        self._console = console
        self._log = log
        self._tail = tail
        self._splitter = LineSplitter()
        self.start()

    def run(self) -> None:
        try:
            while data := os.read(self._fd, 65536):
                self._keep(data)
                self._show(self._splitter.feed(data, time.monotonic()))
            self._show(self._splitter.finish())
        finally:
            os.close(self._fd)
            if self._log is not None:
                self._log.close()

    def _keep(self, data: bytes) -> None:
        if self._log is None:
            return
        try:
            self._log.write(data)
        except OSError as error:  # a full disk shouldn't stop the training
            self._console.notice(f"zrpc launch: {self._log.name}: {error}; no longer kept")
            with contextlib.suppress(OSError):
                self._log.close()
            self._log = None

    def _show(self, lines: list[bytes]) -> None:
        if lines:
            if self._tail is not None:
                self._tail.extend(lines)
            self._console.show(self._rank, lines, error=self._error)


def last_traceback(lines: list[bytes]) -> list[bytes]:
    """The last traceback in `lines` with those chained to it; the last 20 lines without one."""
    starts = [i for i, line in enumerate(lines) if line.lstrip(b" +").startswith(_TRACEBACK)]
    if not starts:
        return lines[-20:]
    first = starts.pop()
    while starts and any(line.startswith(_CHAINED) for line in lines[starts[-1] : first]):
        first = starts.pop()
    return lines[first:]

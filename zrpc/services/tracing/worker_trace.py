"""What one worker has recorded, in a form that can be sent and kept as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zrpc.calls.recorder import CallRecord, HandlerRecord, MessageRecord, Record, SpanRecord

__all__ = ["WorkerTrace"]

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
        threads: the names of its threads, by their idents.
        dropped: how many of the oldest records were dropped.
        rows: the records: the name of the type of each, and its fields.
    """

    member: int
    name: str
    rank: int
    host: str
    pid: int
    names: dict[int, str]
    threads: dict[int, str]
    dropped: int
    rows: list[list[Any]]

    @staticmethod
    def pack(records: Iterable[Record]) -> list[list[Any]]:
        """Returns records as `rows`."""
        return [[type(record).__name__, *record] for record in records]

    def records(self) -> list[Record]:
        """Returns the records."""
        return [_TYPES[kind](*fields) for kind, *fields in self.rows]

    def write(self, path: Path) -> None:
        """Writes it to a file, which appears only when it is complete."""
        part = path.with_name(f"{path.name}.part")
        part.write_text(json.dumps(asdict(self)))
        part.replace(path)

    @classmethod
    def read(cls, path: Path) -> WorkerTrace:
        """Reads what `write` wrote.

        Raises:
            ValueError: the file holds something else.
        """
        try:
            trace = cls(**json.loads(path.read_text()))
        except TypeError as error:
            raise ValueError(f"expected a worker's trace in {path}: {error}") from error
        # The keys of JSON are strings.
        trace.names = {int(member): name for member, name in trace.names.items()}
        trace.threads = {int(ident): name for ident, name in trace.threads.items()}
        return trace

"""How far a run is, while it runs: a bar on a terminal, else a line for each group."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

from zrpc.bench.row import Group, Row
from zrpc.bench.run import Run, Watcher

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["progress"]


@contextlib.contextmanager
def progress(run: Run, stream: TextIO = sys.stderr) -> Iterator[Watcher]:
    """A watcher that shows how far a run is, until the end of the block."""
    if not stream.isatty():
        yield _Lines(run.settings.rounds, stream)
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeRemainingColumn as Remaining
    except ImportError:  # only a nicety
        yield _Lines(run.settings.rounds, stream)
        return
    columns = (BarColumn(), MofNCompleteColumn(), Remaining(), TextColumn("{task.description}"))
    console = Console(file=stream)
    with Progress(*columns, console=console, transient=True) as bar:
        total = len(run.results) * run.settings.rounds
        yield _Bar(bar, bar.add_task("starting", total=total))


class _Lines:
    def __init__(self, rounds: int, stream: TextIO) -> None:
        self._rounds = rounds
        self._stream = stream
        self._last = ""

    def measures(self, number: int, group: Group, row: Row) -> None:
        line = f"round {number} of {self._rounds}: {group.name}"
        if line != self._last:
            print(line, file=self._stream, flush=True)
            self._last = line

    def measured(self) -> None:
        pass


class _Bar:
    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar = bar
        self._task = task

    def measures(self, number: int, group: Group, row: Row) -> None:
        self._bar.update(self._task, description=f"round {number}, {row.name}")

    def measured(self) -> None:
        self._bar.advance(self._task)

"""Shows the progress of a run: a bar on a terminal, otherwise a line for each group."""

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
    """Yields a watcher that shows the progress of a run, until the end of the block."""
    if not stream.isatty():
        yield _LineProgress(run.settings.rounds, stream)
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeRemainingColumn as Remaining
    except ImportError:  # rich is optional
        yield _LineProgress(run.settings.rounds, stream)
        return
    columns = (BarColumn(), MofNCompleteColumn(), Remaining(), TextColumn("{task.description}"))
    console = Console(file=stream)
    with Progress(*columns, console=console, transient=True) as bar:
        total = len(run.results) * run.settings.rounds
        yield _BarProgress(bar, bar.add_task("starting", total=total))


class _LineProgress:
    def __init__(self, rounds: int, stream: TextIO) -> None:
        self._rounds = rounds
        self._stream = stream
        self._last = ""

    def row_started(self, number: int, group: Group, row: Row) -> None:
        line = f"round {number} of {self._rounds}: {group.name}"
        if line != self._last:
            print(line, file=self._stream, flush=True)
            self._last = line

    def row_finished(self) -> None:
        pass


class _BarProgress:
    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar = bar
        self._task = task

    def row_started(self, number: int, group: Group, row: Row) -> None:
        self._bar.update(self._task, description=f"round {number}, {row.name}")

    def row_finished(self) -> None:
        self._bar.advance(self._task)

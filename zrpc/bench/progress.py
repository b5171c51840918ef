"""Shows the progress of a run: a bar on a terminal, otherwise a line for each group."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec

from zrpc.bench.row import Group, Row
from zrpc.bench.run import Run


@contextlib.contextmanager
def progress(run: Run) -> Iterator[Callable[[int, Group, Row], None]]:
    """Yields a function to call as each row begins, until the end of the block."""
    rounds, shown, done = run.settings.rounds, set[str](), itertools.count()
    columns = ("MofNCompleteColumn", "TimeRemainingColumn")
    with open_bar(len(run.results) * rounds, *columns) as update:

        def show(number: int, group: Group, row: Row) -> None:
            line = f"round {number} of {rounds}: {group.name}"
            if update is not None:
                update(completed=next(done), description=f"round {number}, {row.name}")
            elif line not in shown:
                print(line, file=sys.stderr, flush=True)
                shown.add(line)

        yield show


@contextlib.contextmanager
def open_bar(total: float, *columns: str) -> Iterator[Callable[..., None] | None]:
    """Yields what updates a bar on stderr; None if that is no terminal, or without rich.

    Args:
        total: how much is to be done.
        columns: the columns of ``rich.progress`` between the bar and its description.
    """
    if not sys.stderr.isatty() or find_spec("rich") is None:
        yield None
        return
    from rich import progress as rich_progress
    from rich.console import Console

    shown = [getattr(rich_progress, name)() for name in ("BarColumn", *columns)]
    text, console = rich_progress.TextColumn("{task.description}"), Console(stderr=True)
    with rich_progress.Progress(*shown, text, console=console, transient=True) as bar:
        yield functools.partial(bar.update, bar.add_task("starting", total=total))

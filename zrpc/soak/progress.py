"""How far a soak test is: a bar on a terminal, else a line for each step."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from zrpc.soak.record import Record

__all__ = ["progress"]


@contextlib.contextmanager
def progress(
    record: Record, seconds: float, stream: TextIO = sys.stderr
) -> Iterator[Callable[[str], None]]:
    """What to call with each step, until the end of the block.

    Args:
        record: of the run, whose actions are counted.
        seconds: how long it will take.
        stream: where to show it.
    """

    def line(what: str) -> None:
        taken = time.monotonic() - record.began
        print(f"{taken:4.0f} s, {record.actions:,} actions: {what}", file=stream, flush=True)

    if not stream.isatty():
        yield line
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:  # only a nicety
        yield line
        return
    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(file=stream), transient=True) as bar:
        task = bar.add_task("starting", total=seconds)

        def show(what: str) -> None:
            bar.update(
                task,
                completed=time.monotonic() - record.began,
                description=f"{record.actions:,} actions; {what}",
            )

        yield show

"""Shows the progress of a soak test: a bar on a terminal, otherwise a line for each step."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from zrpc.bench.soak.report import Report

__all__ = ["progress"]


@contextlib.contextmanager
def progress(
    report: Report, seconds: float, stream: TextIO = sys.stderr
) -> Iterator[Callable[[str], None]]:
    """Yields a function to call with each step, until the end of the block.

    Args:
        report: the report of the run, which counts its actions.
        seconds: the expected duration of the run.
        stream: where to show the progress.
    """

    def line(what: str) -> None:
        taken = time.monotonic() - report.began
        print(f"{taken:4.0f} s, {report.actions:,} actions: {what}", file=stream, flush=True)

    if not stream.isatty():
        yield line
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:  # rich is optional
        yield line
        return
    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(file=stream), transient=True) as bar:
        task = bar.add_task("starting", total=seconds)

        def show(what: str) -> None:
            bar.update(
                task,
                completed=time.monotonic() - report.began,
                description=f"{report.actions:,} actions; {what}",
            )

        yield show

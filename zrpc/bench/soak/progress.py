"""Shows the progress of a soak test: a bar on a terminal, otherwise a line for each step."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from zrpc.bench.progress import open_bar
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
    with open_bar(seconds, stream, "TimeElapsedColumn") as update:

        def show(what: str) -> None:
            taken = time.monotonic() - report.began
            if update is None:
                text = f"{taken:4.0f} s, {report.actions:,} actions: {what}"
                print(text, file=stream, flush=True)
            else:
                update(completed=taken, description=f"{report.actions:,} actions; {what}")

        yield show

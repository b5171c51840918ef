"""Ctrl-C at a chosen line, in the thread of the test."""

from __future__ import annotations

import contextlib
import gc
import itertools
import linecache
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any


@contextlib.contextmanager
def ctrl_c_at(number: int, *functions: Any) -> Iterator[None]:
    """Sends SIGINT to this process before a line of these functions, counted from 1 as they run.

    For the main thread. Raises KeyboardInterrupt there, or when Ctrl-C is no longer held back; not
    at all if fewer lines run. Lines with ``with`` don't count: they run once more at the end of the
    block, where no signal handler runs, or locks would not be released.
    """
    codes = {function.__code__ for function in functions}
    numbers = itertools.count(1)

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if event == "call":
            return trace if frame.f_code in codes else None
        if event == "line":
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            if not line.lstrip().startswith("with ") and next(numbers) == number:
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    gc.disable()  # what the collector calls can't be interrupted
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
        gc.enable()

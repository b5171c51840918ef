"""An action at any step of zrpc's code, in the thread of the test: a signal, for example."""

from __future__ import annotations

import contextlib
import gc
import linecache
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import zrpc

__all__ = [
    "SHARES",
    "STEPS",
    "Steps",
    "ThreadEntries",
    "at_entry",
    "at_step",
    "count_steps",
    "drawn_steps",
    "interrupt",
    "some_steps",
]

_ROOT = Path(zrpc.__file__).parent
_COUNTED = f"{_ROOT}{os.sep}"
# What tests run their workers with.
_NOT_COUNTED = f"{_ROOT / 'testing'}{os.sep}"

# How many steps of a piece of work `some_steps` draws.
STEPS = int(os.environ.get("ZRPC_STEPS", "40"))
# Into how many tests they are divided, since each test has a limit.
SHARES = 1 if STEPS < 1000 else 16


class Steps:
    """The steps of a block.

    Attributes:
        count: how many there were.
        place: the file, line and function in which the action was called; empty if it was not.
    """

    def __init__(self) -> None:
        self.count = 0
        self.place = ""


@contextlib.contextmanager
def at_step(number: int, action: Callable[[], object]) -> Iterator[Steps]:
    """Calls ``action()`` before a line of zrpc's code runs in this thread, counted from 1.

    The lines that run in the action don't count. What it raises, the line raises, as if a signal's
    handler had. Some lines don't count, as no handler runs there: those with ``with``, which run
    once more at the end of the block, or locks would not be released; ``try:``, and the first line
    of a ``finally``, since Python looks for signals after a call and at a jump back only. And those
    of finalizers (``__del__``) and of what they call, where Python drops what is raised.
    """
    steps = Steps()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        path = code.co_filename
        if not path.startswith(_COUNTED) or path.startswith(_NOT_COUNTED):
            return None
        if event == "call" and _in_finalizer(frame):
            return None
        if event == "line":
            before, line = (linecache.getline(path, frame.f_lineno - n).strip() for n in (1, 0))
            if line != "try:" and before != "finally:" and not line.startswith("with "):
                steps.count += 1
                if steps.count == number:
                    steps.place = _place(frame)
                    action()
        return trace

    tracing = sys.gettrace()
    gc.disable()  # what the collector calls can't be interrupted
    sys.settrace(trace)
    try:
        yield steps
    finally:
        sys.settrace(tracing)
        gc.enable()


@contextlib.contextmanager
def at_entry(number: int, action: Callable[[], object]) -> Iterator[Steps]:
    """Does what `at_step` does, as a function of zrpc begins: as if there were no memory for it.

    Not in finalizers, nor as a block of ``with`` ends, which was entered at the same depth.
    """
    steps = Steps()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if _is_entry(frame, event):
            steps.count += 1
            if steps.count == number:
                steps.place = _place(frame)
                action()

    gc.disable()
    sys.setprofile(profile)
    try:
        yield steps
    finally:
        sys.setprofile(None)
        gc.enable()


class ThreadEntries(Steps):
    """Raises an error at the n-th entry of a function of zrpc in some threads, as `at_entry`.

    Not as a thread begins; nor in a ``lambda``, whose single line may or may not have begun.

    Args:
        threads: what the names of these threads begin with; they start in `profiled`.
    """

    def __init__(self, threads: str) -> None:
        super().__init__()
        self._threads = threads
        self._number: int | None = None
        self._error: type[Exception] = MemoryError
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def profiled(self) -> Iterator[None]:
        """Watches the threads that start in the block."""
        threading.setprofile(self._profile)
        try:
            yield
        finally:
            threading.setprofile(None)

    @contextlib.contextmanager
    def at(self, number: int, error: type[Exception]) -> Iterator[None]:
        """Counts entries in the block, from 1, and raises the error at one of them."""
        self.count, self._number, self._error = 0, number, error
        try:
            yield
        finally:
            self._number = None

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if self._number is None or not _is_entry(frame, event):
            return
        begins = frame.f_back is None or frame.f_back.f_code.co_filename == threading.__file__
        named = threading.current_thread().name.startswith(self._threads)
        if begins or not named or frame.f_code.co_name == "<lambda>":
            return
        with self._lock:
            self.count += 1
            if self.count != self._number:
                return
            self.place = _place(frame)
        raise self._error


def _is_entry(frame: FrameType, event: str) -> bool:
    """Returns whether a function of zrpc is called, other than at the end of a block."""
    code, path = frame.f_code, frame.f_code.co_filename
    if event != "call" or not path.startswith(_COUNTED) or path.startswith(_NOT_COUNTED):
        return False
    return code.co_name != "__exit__" and not _in_finalizer(frame)


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _in_finalizer(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def interrupt() -> None:
    """Does what Ctrl-C does, in the main thread."""
    signal.raise_signal(signal.SIGINT)


def count_steps(work: Callable[[], object], at: Any = at_step) -> int:
    """Returns how many steps a piece of work takes. It varies a little with the other threads."""
    with at(0, lambda: None) as steps:
        work()
    count: int = steps.count
    return count


def some_steps(
    work: Callable[[], object], share: int | None = None, at: Any = at_step
) -> list[int]:
    """Returns steps at which to interrupt a piece of work: as many as ``ZRPC_STEPS``, or all.

    If ``share`` is a number, of these one of `SHARES` equal shares.
    """
    return drawn_steps(count_steps(work, at), STEPS, share)


def drawn_steps(count: int, most: int, share: int | None = None) -> list[int]:
    """Returns some of as many steps, as `some_steps`, at most this number of them."""
    steps = range(1, count + 1)
    some = steps if count <= most else sorted(random.Random(0).sample(steps, most))
    return list(some if share is None else some[share::SHARES])

"""The stacks of this process's threads, as text."""

from __future__ import annotations

import re
import threading
import traceback
from collections.abc import Callable, Iterable

from zrpc.runtime.thread_frames import thread_frames
from zrpc.services.inspection.report import stack_text

# The files of the calls with which a test's stack begins.
_RUNNERS = r"[/\\](_pytest|pluggy)[/\\]"


def stacks_of(worker: str) -> str:
    """Returns the stacks of the threads whose names contain the worker's name as a word.

    Args:
        worker: the worker's name; ``worker1`` does not match the threads of ``worker10``.

    May be called from any thread.
    """
    return _format(lambda thread: _belongs(thread, worker)) or "no threads\n"


def other_stacks(workers: Iterable[str]) -> str:
    """Returns the stacks of all other threads except the calling one.

    Args:
        workers: the workers whose threads are left out.

    May be called from any thread.
    """
    names = list(workers)
    me = threading.current_thread()
    return _format(
        lambda thread: thread is not me and not any(_belongs(thread, name) for name in names)
    )


def _belongs(thread: threading.Thread, worker: str) -> bool:
    word = rf"(?<![A-Za-z0-9_]){re.escape(worker)}(?![A-Za-z0-9_])"
    return re.search(word, thread.name) is not None


def _format(wanted: Callable[[threading.Thread], bool]) -> str:
    frames = thread_frames()
    parts = []
    for thread in filter(wanted, threading.enumerate()):
        if thread.ident in frames:
            stack = _without_runners(traceback.extract_stack(frames[thread.ident]))
            lines = [(frame.filename, frame.lineno or 0, frame.name) for frame in stack]
            parts.append(stack_text(f"Thread {thread.name}", lines))
    return "".join(parts)


def _without_runners(stack: traceback.StackSummary) -> list[traceback.FrameSummary]:
    """Removes the outermost calls, which are the same in every thread and test."""
    frames = list(stack)
    outer = [i for i, frame in enumerate(frames) if re.search(_RUNNERS, frame.filename)]
    for_threads = [i for i, frame in enumerate(frames[:3]) if frame.filename == threading.__file__]
    return frames[max([*outer, *for_threads], default=-1) + 1 :] or frames

"""The callbacks of futures: how deep they nest, and that none gets lost.

A callback completes the next future, whose callbacks run inside of that, and so on. Like this a
chain of some hundred futures would take up all of the stack. So callbacks nest a few deep only;
from there on they wait until the one that runs returns, and come next then, in the same thread and
in the same order.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["interrupts", "note_interrupt", "raise_interrupt", "run", "work_off"]

logger = logging.getLogger(__name__)

# So many run inside of each other at most, but for those of futures that are done already: more
# than programs nest that block in one callback until another one has run. Where the thread's stack
# has less than so many frames left, they do not nest at all: torch, which calls them, loses those
# that find no room.
DEEPEST = 8
_SPARE = 200


class Job(Protocol):
    """What is to run once a future is done."""

    def __call__(self) -> None:
        """Calls what the user wrote, and completes what waits for that."""

    def fail(self, error: BaseException) -> None:
        """Completes what waits for it with an error, where that is not done."""


class _Nesting(threading.local):
    """The callbacks of one thread, which nobody else sees."""

    depth = 0  # how many run
    deepest = DEEPEST  # how many may

    def __init__(self) -> None:
        # Those that came up while the present one ran, and those that were to come after it.
        self.added: deque[Job] = deque()
        self.waiting: deque[Job] = deque()


_nesting = _Nesting()

# Ctrl-C that has come while the main thread ran a callback, for that thread. It could not go on
# from there: torch, which calls the callbacks, drops what they raise.
interrupts: list[KeyboardInterrupt] = []


def run(job: Job, _done: Any = None, at_once: bool = False) -> None:
    """Runs a job in this thread: now, or where others are under way here, maybe right after them.

    Args:
        job: what to run.
        _done: the future, as torch passes it.
        at_once: whether it is to run now in any case.
    """
    nesting = _nesting
    if not nesting.depth:
        nesting.deepest = 1 if _is_full() else DEEPEST
    elif nesting.depth >= nesting.deepest and not at_once:
        nesting.added.append(job)
        return
    # One that runs at once, deeper than others may, leaves what is put off to those: else each of a
    # long chain of such would run the next one inside of itself.
    works_off = nesting.depth < nesting.deepest
    nesting.depth += 1
    try:
        _do(job)
        # Also those that were to come after what a job has waited for, see `work_off`.
        if works_off and (nesting.added or nesting.waiting):
            _work_off(_never)
    except BaseException as error:  # Ctrl-C between two of them
        note_interrupt(error)
        if works_off:
            _work_off(_never)
    finally:
        nesting.depth -= 1


def work_off(enough: Callable[[], bool]) -> None:
    """Runs jobs that were put off in this thread, until ``enough()``.

    For callbacks that are about to wait for a future that another one completes.
    """
    if _nesting.depth >= _nesting.deepest:
        _work_off(enough)


def note_interrupt(error: BaseException) -> bool:
    """Keeps what a callback has raised for `raise_interrupt`, where that is Ctrl-C."""
    if not isinstance(error, KeyboardInterrupt) or not _in_main_thread():
        return False
    if error not in interrupts:
        interrupts.append(error)
    return True


def raise_interrupt() -> None:
    """To be called where callbacks may have run, if there are `interrupts`.

    Raises:
        KeyboardInterrupt: it has come in a callback of this thread, and none is under way any more.
    """
    if interrupts and not _nesting.depth and _in_main_thread():
        error = interrupts[0]
        interrupts.clear()
        # Another one: by its traceback it would refer to the future that may keep the first.
        raise KeyboardInterrupt(*error.args) from error


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _work_off(enough: Callable[[], bool]) -> None:
    nesting = _nesting
    while not enough():
        # As if each had run inside of what completed its future: before all that came up earlier.
        nesting.waiting.extendleft(reversed(nesting.added))
        nesting.added.clear()
        if not nesting.waiting:
            return
        _do(nesting.waiting.popleft())


def _is_full() -> bool:
    """Whether little room is left on this thread's stack."""
    try:
        sys._getframe(max(0, sys.getrecursionlimit() - _SPARE))
    except ValueError:  # it is not that deep
        return False
    return True


def _never() -> bool:
    return False


def _do(job: Job) -> None:
    try:
        job()
    except BaseException as error:
        # No room left on the stack, say, where it failed. A future must not stay open for that.
        try:
            job.fail(error)
        except BaseException:
            logger.exception("A callback of a Future failed")

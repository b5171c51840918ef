"""A trampoline for the callbacks of futures: limits how deep they nest, and loses none.

A callback completes the next future, whose callbacks run inside of it, and so on. A chain of some
hundred futures would use up the stack. So callbacks nest only a few deep. Deeper ones are postponed
until the running one returns, and run next, in the same thread and in the same order.
"""

from __future__ import annotations

import logging
import threading
from _thread import start_new_thread
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from zrpc.runtime.interrupts import (
    in_main_thread,
    raised_by_handler,
    run_interruptibly,
    uninterrupted,
)
from zrpc.runtime.resource_limits import stack_is_full
from zrpc.wire.graph_capture import is_tracing, uncaptured

logger = logging.getLogger(__name__)

# How deep callbacks nest, except those of futures that are done already. Programs that block in one
# callback until another one has run nest less deep.
_MAX_DEPTH = 8


class Job(Protocol):
    """A job that runs once a future is done."""

    def __call__(self) -> None:
        """Calls the user's callback, and completes the future of its result."""

    def fail(self, error: BaseException) -> None:
        """Completes the future of its result with an error, unless that is done."""


class _Nesting(threading.local):
    """The callbacks of one thread, which no other thread sees."""

    depth = 0  # how many callbacks run
    max_depth = _MAX_DEPTH  # how many may run

    def __init__(self) -> None:
        # Postponed jobs: those that the current job added, and those that run after them.
        self.added: deque[Job] = deque()
        self.waiting: deque[Job] = deque()


_nesting = _Nesting()

# What Ctrl-C and other signals have raised in callbacks in the main thread, to be raised there
# later: torch, which calls the callbacks, drops what they raise.
interrupts: list[BaseException] = []


def with_room(act: Callable[..., None], *args: Any) -> None:
    """Calls what makes torch run callbacks, in another thread if this one's stack is nearly full.

    Torch loses a callback that finds no room, or ends the process. To be called with signal
    handlers held back.
    """
    if not stack_is_full():
        act(*args)
        return
    # Not by `threading`, which needs more room in this thread.
    done = threading.Lock()
    done.acquire()
    start_new_thread(_act, (act, args, done))
    run_interruptibly(done.acquire)


def _act(act: Callable[..., None], args: tuple[Any, ...], done: threading.Lock) -> None:
    try:
        act(*args)
    finally:
        done.release()


def run(job: Job, at_once: bool = False) -> None:
    """Runs a job in this thread: now, or after the jobs that run here if they nest too deep.

    Torch, for which this runs, drops what is raised. So signal handlers are held back, except while
    the user's callback runs. With ``at_once``, the job runs now in any case.
    """
    if is_tracing():
        with uncaptured():  # it may as well run in another thread, which makes no trace
            run(job, at_once)
        return
    nesting = _nesting
    if not nesting.depth:
        # With a stack that is nearly full, callbacks don't nest at all.
        nesting.max_depth = 1 if stack_is_full() else _MAX_DEPTH
    if nesting.depth and nesting.depth >= nesting.max_depth and not at_once:
        nesting.added.append(job)
        return
    # A job that runs at once, deeper than the limit, leaves the postponed jobs to those above it:
    # else each job of a long chain of such would run the next one inside of itself.
    runs_postponed = nesting.depth < nesting.max_depth
    nesting.depth += 1
    try:
        try:
            job()
        except BaseException as error:
            fail(job, error)  # no room left on the stack, for example
        # Also the jobs that were to run after one that this job waited for; see `run_postponed`.
        if runs_postponed and (nesting.added or nesting.waiting):
            _run_postponed(_never)
    except BaseException as error:  # Ctrl-C between two jobs
        note_interrupt(error)
        if runs_postponed:
            _run_postponed(_never)
    finally:
        nesting.depth -= 1


def run_postponed(enough: Callable[[], bool]) -> None:
    """Runs the postponed jobs of this thread until ``enough()``.

    For callbacks that are about to wait for a future that another callback completes.
    """
    if _nesting.depth >= _nesting.max_depth:
        with uninterrupted:
            _run_postponed(enough)


def note_interrupt(error: BaseException) -> bool:
    """Keeps an error of a callback for `raise_interrupt` if it is of Ctrl-C or a signal handler.

    Returns:
        Whether it is.
    """
    ctrl_c = isinstance(error, KeyboardInterrupt) and in_main_thread()
    if not ctrl_c and not raised_by_handler(error):
        return False
    if error not in interrupts:
        interrupts.append(error)
    return True


def raise_interrupt() -> None:
    """Raises a kept interrupt. Call it after callbacks may have run, if there are `interrupts`.

    Raises:
        BaseException: it came in a callback of this thread, and no callback runs any longer.
    """
    if interrupts and not _nesting.depth and in_main_thread():
        error = interrupts[0]
        interrupts.clear()
        if type(error) is not KeyboardInterrupt:
            raise error  # unchanged
        # A new one: its traceback would refer to the future that may keep the first one.
        raise KeyboardInterrupt(*error.args) from error


def _run_postponed(enough: Callable[[], bool]) -> None:
    nesting = _nesting
    while not enough():
        # In the order of nested calls: jobs added by the latest job run before all earlier ones.
        nesting.waiting.extendleft(reversed(nesting.added))
        nesting.added.clear()
        if not nesting.waiting:
            return
        job = nesting.waiting.popleft()
        try:  # in place, as in `run`: a function for both might find no memory for its frame
            job()
        except BaseException as error:
            fail(job, error)


def _never() -> bool:
    return False


def fail(job: Job, error: BaseException) -> None:
    """Completes the future of a job that could not run: threads may wait for it."""
    try:
        job.fail(error)
    except BaseException:
        logger.exception("A callback of a Future failed")

"""How a worker's failure is shown in the test."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import TypeVar

from zrpc.wire.exceptions import set_cause

E = TypeVar("E", bound=BaseException)


class WorkerExited(ConnectionError):
    """A worker's process exited while it was needed; the message says how it exited."""


class WorkerFailed(RuntimeError):
    """A worker's exception or result can't be sent; the message describes it."""


class WorkerTraceback(Exception):
    """The cause of a worker's exception: the worker's name and the traceback there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def attribute(error: E, worker: str, text: str) -> E:
    """Adds a `WorkerTraceback` to ``error``, as the last of its causes.

    Args:
        error: the exception that is raised in the test, with its own type.
        worker: the worker's label: ``worker1 (pid 4711)``.
        text: the traceback on the worker.

    Returns:
        ``error``, changed.
    """
    last = _last_cause(error)
    if not isinstance(last, WorkerTraceback):  # one error may fail several calls
        set_cause(last, WorkerTraceback(f"in {worker}:\n{text}"))
    return error


def add_others(error: E, others: Mapping[str, BaseException]) -> E:
    """Adds to the first worker's ``error`` which others failed, and how.

    Returns:
        ``error``, changed.
    """
    lines = [
        f"{worker} failed as well: {type(other).__name__}: {other}"
        for worker, other in others.items()
        if other is not error
    ]
    last = _last_cause(error)
    if lines and isinstance(last, WorkerTraceback):
        last.args = ("\n".join([last.args[0], *lines]),)
    return error


def _last_cause(error: BaseException) -> BaseException:
    seen = {id(error)}
    while error.__cause__ is not None and id(error.__cause__) not in seen:
        error = error.__cause__
        seen.add(id(error))
    return error


def without_frames(error: E, count: int) -> E:
    """Removes the ``count`` outermost frames, which are zrpc's, from the traceback of ``error``."""
    tb = error.__traceback__
    for _ in range(count):
        tb = tb.tb_next if tb is not None else None
    return error.with_traceback(tb)


def traceback_of(error: BaseException) -> str:
    """Returns the traceback of ``error`` and its causes as text."""
    return "".join(traceback.format_exception(error))

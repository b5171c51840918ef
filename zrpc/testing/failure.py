"""How a worker's failure looks in the test that it fails."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import TypeVar

__all__ = [
    "WorkerExited",
    "WorkerFailed",
    "WorkerTraceback",
    "add_others",
    "attribute",
    "traceback_of",
    "without_frames",
]

E = TypeVar("E", bound=BaseException)


class WorkerExited(ConnectionError):
    """A worker's process ended while it was needed; the message says how it ended."""


class WorkerFailed(RuntimeError):
    """A worker's exception or result that can't be sent; the message tells it as text."""


class WorkerTraceback(Exception):
    """The cause of an exception that came from a worker: whose, and its traceback there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def attribute(error: E, worker: str, text: str) -> E:
    """Makes ``error`` say which worker it comes from, as the last of its causes.

    Args:
        error: the exception as it is raised in the test, of its own type.
        worker: the worker, as a reader knows it: ``worker1 (pid 4711)``.
        text: its traceback there.

    Returns:
        ``error``, changed.
    """
    last = _last_cause(error)
    if not isinstance(last, WorkerTraceback):  # one error may fail several calls
        last.__cause__ = WorkerTraceback(f"in {worker}:\n{text}")
    return error


def add_others(error: E, others: Mapping[str, BaseException]) -> E:
    """Makes ``error``, of the worker that failed first, tell which others failed, and how.

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
    """``error`` without the ``count`` outermost frames of its traceback, which are ours."""
    tb = error.__traceback__
    for _ in range(count):
        tb = tb.tb_next if tb is not None else None
    return error.with_traceback(tb)


def traceback_of(error: BaseException) -> str:
    """The traceback of ``error`` as text, with those of its causes."""
    return "".join(traceback.format_exception(error))

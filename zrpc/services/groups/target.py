"""Whom a call of a group goes to, and until when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any

from zrpc.calls.caller import Caller
from zrpc.errors import RpcTimeoutError
from zrpc.membership.worker_info import WorkerInfo

# A call that is made within this time has the timeout of the whole: an error then says where that
# comes from.
_AT_ONCE_SECONDS = 0.001


@dataclass(frozen=True, slots=True)
class Target:
    """A member, as a call sees it.

    Attributes:
        info: the worker that is called.
        name: what it is called, for messages to people.
        ask: sends a request: a body, and a timeout.
    """

    info: WorkerInfo
    name: str
    ask: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Joining:
    """Workers that belong to a group as soon as they join.

    Attributes:
        pattern: of their names.
        target: makes a target of one.
    """

    pattern: str
    target: Callable[[WorkerInfo], Target]


class Deadline:
    """The time limit of all calls of a group together; it begins to run now.

    Args:
        caller: knows the default.
        timeout: seconds; 0 for no limit, negative for the default.
    """

    def __init__(self, caller: Caller, timeout: float) -> None:
        self._timeout = timeout
        self._seconds = caller.timeout(timeout)
        self._begun = monotonic()

    def left(self) -> float:
        """Returns the timeout of a call that is made now.

        Raises:
            RpcTimeoutError: no time is left.
        """
        passed = monotonic() - self._begun
        if not self._seconds or passed < _AT_ONCE_SECONDS:
            return self._timeout
        if passed < self._seconds:
            return self._seconds - passed
        error = RpcTimeoutError(
            f"the call was not sent within the timeout of the group ({self._seconds:g} s): the "
            "calls of its other members took that long to be sent, or this worker was busy"
        )
        error.executed = False
        raise error

"""A thread of the program that waits for others to say who has a name."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from zrpc.agent.agent import Agent
from zrpc.calls.cancel_scope import current_scope
from zrpc.constants import Seconds
from zrpc.runtime.interrupts import uninterrupted
from zrpc.runtime.thread_pool import pass_gate
from zrpc.wire.member_id import NOBODY, MemberId

T = TypeVar("T")


class Deadline:
    """How long a thread waits in all, over several steps.

    Args:
        agent: has the default timeout.
        timeout: seconds; 0 for no limit, -1 for the default. In a handler it is never longer than
            the handler's caller waits.

    Attributes:
        timeout: seconds; 0 means no limit.
    """

    def __init__(self, agent: Agent, timeout: Seconds) -> None:
        seconds, scope = agent.caller.timeout(timeout), current_scope()
        self.timeout = seconds if scope is None else scope.bounded(seconds)
        self._end = time.monotonic() + self.timeout

    def left(self) -> float:
        """Returns the seconds that are left; 0 means no limit."""
        return max(0.001, self._end - time.monotonic()) if self.timeout else 0


class Waiting(Generic[T]):
    """One answer, for one thread that waits. `answer` and `fail` may be called from any thread.

    Args:
        deadline: until when the thread waits.
        too_late: returns the error if it passes first.
        member: whom the thread waits for; nobody in particular by default.

    Attributes:
        member: the same.
    """

    __slots__ = ("_deadline", "_error", "_gate", "_lock", "_too_late", "_value", "member")

    def __init__(
        self, deadline: Deadline, too_late: Callable[[], Exception], member: MemberId = NOBODY
    ) -> None:
        self.member = member
        self._deadline = deadline
        self._too_late = too_late
        self._gate = threading.Lock()  # open once there is an answer
        self._gate.acquire()
        self._lock = threading.Lock()  # guards what follows; no other lock is taken with it
        self._value: list[T] = []
        self._error: Exception | None = None

    def answer(self, value: T) -> None:
        """Takes the answer, unless there is one."""
        self._end([value], None)

    def fail(self, error: Exception) -> None:
        """Takes an error, unless there is an answer."""
        self._end([], error)

    def _end(self, value: list[T], error: Exception | None) -> None:
        with uninterrupted, self._lock:
            if self._gate.locked():
                self._value, self._error = value, error
                self._gate.release()

    def get(self) -> T:
        """Waits for the answer and returns it.

        Raises:
            Exception: the deadline has passed; or what `fail` was given.
        """
        if not pass_gate(self._gate, self._deadline.left() or -1):
            self.fail(self._too_late())
        if self._error is not None:
            raise self._error
        return self._value[0]

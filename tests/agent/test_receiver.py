"""What a turn of the receiving thread takes in before it runs a handler."""

from __future__ import annotations

import contextvars
from collections import deque
from typing import Any

import pytest

from zrpc import WorkerInfo
from zrpc.agent.receiver import Receiver
from zrpc.calls.pending_calls import NEVER
from zrpc.runtime.job_times import JobTimes


class Messages:
    """A network on which several requests have come, and their dispatcher."""

    busy = False
    receiver: Receiver

    def __init__(self, *messages: str) -> None:
        self.left = deque((message,) for message in messages)

    def wake(self) -> None:
        pass

    def receive(self, timeout: float, spin: float) -> tuple[str] | None:
        return self.at_hand()

    def at_hand(self) -> tuple[str] | None:
        return self.left.popleft() if self.left else None

    def dispatch(self, message: str) -> None:
        self.receiver.run(lambda: None)


class Pool:
    """A pool to which nothing is handed over."""

    def __init__(self, seconds: float) -> None:
        self.times = JobTimes()
        for _ in range(100):
            self.times.took(seconds)


class NoCalls:
    earliest = NEVER

    def __len__(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("seconds", "left"), [(1e-6, 2), (1e-3, 0)], ids=["quick handlers", "short handlers"]
)
def test_other_messages_wait_for_quick_handlers_only(seconds: float, left: int) -> None:
    """Handlers that take longer may run side by side."""
    messages: Any = Messages("first", "second", "third")
    pool: Any = Pool(seconds)
    receiver = Receiver(WorkerInfo("test", 0), contextvars.Context(), messages, pool, pool)
    messages.receiver = receiver
    receiver._threads.take = lambda pool, job: True  # type: ignore[method-assign]
    calls: Any = NoCalls()
    receiver._threads.start = lambda: None  # type: ignore[method-assign]
    receiver.start(messages, calls, lambda now: None, lambda: None)
    receiver._lead()
    assert len(messages.left) == left

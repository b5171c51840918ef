"""What a turn of the receiving thread takes in, and when the I/O thread must receive again."""

from __future__ import annotations

import contextvars
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.failing_log import failing_log
from zrpc import WorkerInfo
from zrpc.agent.receiver import Receiver
from zrpc.agent.shutdown import Phase
from zrpc.calls.pending_call import NEVER
from zrpc.runtime.job_times import JobTimes


class Messages:
    """A network on which several requests have come, and their dispatcher."""

    receiver: Receiver
    job_pool: Any = None

    def __init__(self, *messages: str) -> None:
        self.at_hand = deque((message,) for message in messages)
        self.unfinished: dict[int, Any] = {}
        self.inbox = SimpleNamespace(unread=False)

    def wake(self) -> None:
        pass

    def receive(self, timeout: float, spin: float) -> tuple[str] | None:
        return self.at_hand.popleft() if self.at_hand else None

    def dispatch(self, at_hand: deque[tuple[str]]) -> None:
        at_hand.popleft()
        self.receiver._threads.job_pool = self.job_pool  # has the handler of this message


class Pool:
    """A pool to which nothing is handed over."""

    def __init__(self, seconds: float) -> None:
        self.times = JobTimes()
        for _ in range(100):
            self.times.took(seconds)


class Calls:
    """A number of calls in flight that never expire."""

    earliest = NEVER

    def __init__(self, number: int) -> None:
        self.by_id = dict.fromkeys(range(number))


def nothing() -> None:
    pass


def started(
    messages: Any,
    pool: Any,
    calls: Any,
    tick: Callable[[], None] = nothing,
    look: Callable[[], None] = nothing,
    **shutdown_state: Any,
) -> Receiver:
    """Returns a receiver that was started, but for its threads."""
    shutdown: Any = SimpleNamespace(**{"phase": Phase.RUNNING, **shutdown_state})
    worker = WorkerInfo("test", 0)
    receiver = Receiver(worker, contextvars.Context(), messages, pool, pool, shutdown)
    receiver._threads.start = lambda: None  # type: ignore[method-assign]
    receiver.start(messages, calls, (), look, tick)
    return receiver


@pytest.mark.parametrize(
    ("seconds", "handlers", "left"),
    [(1e-6, True, 2), (1e-3, True, 0), (1e-6, False, 0)],
    ids=["quick handlers", "short handlers", "quick callbacks"],
)
def test_other_messages_wait_for_quick_handlers_only(
    seconds: float, handlers: bool, left: int
) -> None:
    """Handlers that take longer may run side by side."""
    messages: Any = Messages("first", "second", "third")
    pool: Any = Pool(seconds)
    messages.job_pool = pool if handlers else Pool(seconds)
    receiver = messages.receiver = started(messages, pool, Calls(0))
    receiver._turn(NEVER)
    assert len(messages.at_hand) == left


@pytest.mark.parametrize(("asked", "looks"), [(False, 1), (True, 3)])
def test_a_shutdown_looks_often_only_while_it_waits_for_this_worker(
    asked: bool, looks: int
) -> None:
    """The ticks stay ten a second: they take longer than a call."""
    messages: Any = Messages("first", "second", "third")
    happened: list[str] = []
    messages.receiver = receiver = started(
        messages,
        Pool(1e-3),
        Calls(0),
        partial(happened.append, "tick"),
        partial(happened.append, "look"),
        phase=Phase.BEGUN_ELSEWHERE,
        asked=asked,
        timing=SimpleNamespace(look=0.0),
    )
    begun = time.monotonic()
    for _ in range(3):
        receiver._turn(NEVER)
    assert happened.count("tick") <= 1 + 10 * (time.monotonic() - begun)
    assert looks <= happened.count("look") <= looks + 10 * (time.monotonic() - begun)


class LateCalls(Calls):
    """Calls whose deadlines have passed."""

    earliest = 0.0
    expired = False

    def expire(self, now: float) -> None:
        self.expired = True
        self.earliest = NEVER


@pytest.mark.parametrize("log", ["a log", "a log that fails"])
def test_deadlines_hold_though_what_is_due_now_and_then_fails(log: str) -> None:
    pool: Any = Pool(1e-6)
    messages: Any = Messages()
    calls: Any = LateCalls(1)
    ticks: list[None] = []

    def tick() -> None:
        ticks.append(None)
        raise LookupError

    receiver = started(messages, pool, calls, tick)
    begun = time.monotonic()
    with failing_log() if log == "a log that fails" else nullcontext():
        for _ in range(3):
            receiver._turn(NEVER)
    assert calls.expired
    assert 1 <= len(ticks) <= 1 + 10 * (time.monotonic() - begun)  # at most ten times a second

"""The cancel scope of a handler: its deadline, its cancellation, and the calls in it."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.pending import table
from tests.support.waiting import pending
from zrpc.calls.cancel_scope import CancelScope
from zrpc.calls.pending_call import PendingCall
from zrpc.calls.pending_calls import OVERHEAD_BYTES
from zrpc.errors import RpcCancelledError, RpcTimeoutError
from zrpc.membership.worker_info import WorkerInfo
from zrpc.wire.member_id import MemberId

CALLER = WorkerInfo("worker0", 0)
SOON = 5.0


@pytest.fixture
def scope() -> Any:
    return CancelScope(CALLER, 0)


@pytest.fixture
def calls() -> Any:
    return table()


def test_a_handler_begins_unless_it_was_cancelled_or_its_deadline_has_passed(scope: Any) -> None:
    assert scope.begin()
    assert not scope.abandoned
    assert not scope.cancel()  # its job was no longer queued
    assert scope.abandoned
    scope = CancelScope(CALLER, 0)
    assert [scope.cancel(), scope.cancel(), scope.begin()] == [True, False, False]
    scope = CancelScope(CALLER, 1e-9)
    assert scope.abandoned
    assert not scope.begin()
    assert scope.cancelled  # its answer is not sent
    scope = CancelScope(CALLER, 1e-9, must_run=True)
    assert not scope.cancel()
    assert not scope.abandoned
    assert scope.begin()
    assert scope.remaining() == 0


def test_either_it_begins_or_it_is_dropped(scope: Any) -> Any:
    """With two threads: never both, never neither."""
    for _ in range(300):
        scope = CancelScope(CALLER, 0)
        together = threading.Barrier(2)

        def begin(scope: Any = scope, together: Any = together) -> Any:
            together.wait()
            return scope.begin()

        with ThreadPoolExecutor(1) as pool:
            begun = pool.submit(begin)
            together.wait()
            dropped = scope.cancel()
            assert not (dropped and begun.result())


def child_of(scope: Any, calls: Any, size: int = -1) -> Any:
    """Enters a call of the scope's handler."""
    call = PendingCall(calls, MemberId(1), 0)
    call.parent = scope
    calls.enter(call, size)
    return call


def test_calls_that_wait_for_room_end_first(scope: Any) -> None:
    """Ending the others first would give them room."""
    scope.begin()
    calls = table(limit=OVERHEAD_BYTES)
    ended = []

    class Follower:
        def on_settled(self, call: Any) -> None:
            ended.append(call.claim().executed)

    for _ in range(10):
        child_of(scope, calls, size=0).follower = Follower()
    scope.cancel()
    assert ended == [False] * 9 + [None]


def test_settled_children_are_not_kept(scope: Any, calls: Any) -> None:
    scope.begin()
    child = child_of(scope, calls)
    calls.settle(child.call_id, "done")
    kept = weakref.ref(child)
    del child
    gc.collect()
    assert kept() is None


def test_a_nested_call_is_bounded_by_the_deadline(scope: Any) -> None:
    for own, asked, expected in ((0, 0, 0), (0, 3, 3), (10, 3, 3), (10, 0, 10), (10, 30, 10)):
        assert CancelScope(CALLER, own).bounded(asked) == pytest.approx(expected, abs=0.5)
    assert 0 < CancelScope(CALLER, 1e-9).bounded(0) < 0.01  # also after the deadline
    assert scope.remaining() is None
    assert 9 < CancelScope(CALLER, 10).remaining() <= 10


def test_a_wait_ends_with_the_scope_its_timeout_or_the_deadline(scope: Any) -> None:
    scope.begin()
    begin = time.monotonic()
    assert not scope.wait(0.02)
    assert time.monotonic() - begin >= 0.02
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(scope.wait, SOON) for _ in range(3)]
        assert all(pending(each, 0.02) for each in waiting)
        scope.cancel()
        assert all(w.result() for w in waiting)
    assert scope.wait(0)
    assert CancelScope(CALLER, 0.02).wait(None)
    assert CancelScope(CALLER, 0.02).wait(SOON)
    assert time.monotonic() - begin < SOON
    assert not CancelScope(CALLER, 1e-9, must_run=True).wait(0.01)


def test_a_task_whose_loop_is_closed_is_left_alone(scope: Any) -> None:
    async def own_task() -> Any:
        return asyncio.current_task()

    scope.begin()
    task = asyncio.run(own_task())
    assert scope.follow(task)
    scope.cancel()
    assert not scope.follow(task)


def test_a_time_out_of_what_was_left_is_caused_by_the_end_of_the_scope() -> None:
    scope = CancelScope(CALLER, 10)
    assert scope.has_caused(RpcTimeoutError(f"it took too long. {scope.explanation()}"))
    assert scope.has_caused(RpcCancelledError())
    assert not scope.has_caused(RpcTimeoutError("it took longer than its own timeout"))
    assert not scope.has_caused(KeyError())

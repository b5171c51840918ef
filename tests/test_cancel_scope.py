"""The scope of a handler: its deadline, its end, and the calls that end with it."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from zrpc.calls import PendingCalls
from zrpc.cancel_scope import CancelScope, activate, current_scope, deactivate
from zrpc.errors import RpcCancelledError
from zrpc.worker_info import WorkerInfo

CALLER = WorkerInfo("worker0", 0)
SOON = 5.0


@pytest.fixture
def scope():
    return CancelScope(CALLER, 0)


@pytest.fixture
def calls():
    return PendingCalls()


def test_a_handler_that_is_waited_for_begins(scope):
    assert scope.begin()
    assert not scope.over
    assert not scope.cancel()  # nothing of it was left queued
    assert scope.over


def test_one_that_was_cancelled_does_not_begin(scope):
    assert scope.cancel()
    assert not scope.cancel()  # once
    assert not scope.begin()


def test_nor_one_whose_deadline_has_passed():
    scope = CancelScope(CALLER, 1e-9)
    assert scope.over
    assert not scope.begin()
    assert scope.cancelled  # its answer is not sent


def test_either_it_begins_or_it_is_dropped(scope):
    """Two threads: never both, never neither."""
    for _ in range(300):
        scope = CancelScope(CALLER, 0)
        together = threading.Barrier(2)

        def begin(scope=scope, together=together):
            together.wait()
            return scope.begin()

        with ThreadPoolExecutor(1) as pool:
            begun = pool.submit(begin)
            together.wait()
            dropped = scope.cancel()
            assert not (dropped and begun.result())


def test_what_is_made_for_others_runs_in_any_case():
    scope = CancelScope(CALLER, 1e-9, lasting=True)
    assert not scope.cancel()
    assert not scope.over
    assert scope.begin()
    assert scope.remaining() == 0


def test_children_end_with_it(scope, calls):
    scope.begin()
    children = [calls.add(0, 0) for _ in range(3)]
    for child in children:
        scope.adopt(child)
    children[0].give_up(KeyError("earlier"))
    scope.cancel()
    assert [type(child.claim()) for child in children] == [
        KeyError,
        RpcCancelledError,
        RpcCancelledError,
    ]
    late = calls.add(0, 0)
    scope.adopt(late)
    assert isinstance(late.claim(), RpcCancelledError)
    assert len(calls) == 0


def test_calls_that_are_not_sent_yet_end_first(scope, calls):
    """They wait for room, which the end of the others would give them."""
    scope.begin()
    ended = []

    class Follower:
        def on_settled(self, call):
            ended.append(call.sent)

    for i in range(20):
        call = calls.add(0, 0)
        call.sent = i % 2 == 0
        call.follower = Follower()
        scope.adopt(call)
    scope.cancel()
    assert ended == [False] * 10 + [True] * 10


def test_children_that_have_ended_are_forgotten(scope, calls):
    scope.begin()
    for _ in range(10):
        child = calls.add(0, 0)
        scope.adopt(child)
        calls.pop(child.call_id).settle("done")
    settled = calls.add(0, 0)
    calls.pop(settled.call_id).settle("done")
    scope.adopt(settled)  # before it could
    assert not scope._children


def test_only_what_was_sent_is_told_to_the_callee():
    told = []
    calls = PendingCalls(on_cancel=told.append)
    unsent, sent = calls.add(0, 0), calls.add(0, 0)
    sent.sent = True
    assert unsent.cancel()
    assert sent.cancel()
    assert not sent.cancel()
    assert told == [sent]


@pytest.mark.parametrize(
    ("own", "asked", "expected"), [(0, 0, 0), (0, 3, 3), (10, 3, 3), (10, 0, 10), (10, 30, 10)]
)
def test_a_nested_call_takes_no_longer(own, asked, expected):
    assert CancelScope(CALLER, own).bounded(asked) == pytest.approx(expected, abs=0.5)


def test_after_the_deadline_a_nested_call_still_has_a_limit():
    assert 0 < CancelScope(CALLER, 1e-9).bounded(0) < 0.01


def test_remaining(scope):
    assert scope.remaining() is None
    assert 9 < CancelScope(CALLER, 10).remaining() <= 10
    assert CancelScope(CALLER, 1e-9).remaining() == 0


def test_a_wait_ends_with_the_scope(scope):
    scope.begin()
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(scope.wait, SOON) for _ in range(3)]
        while scope._gate is None:
            time.sleep(0.001)
        scope.cancel()
        assert all(w.result() for w in waiting)
    assert scope.wait(0)


def test_a_wait_ends_with_its_timeout_or_the_deadline(scope):
    begin = time.monotonic()
    assert not scope.wait(0.02)
    assert time.monotonic() - begin >= 0.02
    assert CancelScope(CALLER, 0.02).wait(None)
    assert CancelScope(CALLER, 0.02).wait(SOON)
    assert time.monotonic() - begin < SOON
    assert not CancelScope(CALLER, 1e-9, lasting=True).wait(0.01)


def test_the_task_is_cancelled(scope):
    async def main():
        scope.begin()
        task = asyncio.ensure_future(asyncio.sleep(SOON))
        assert scope.follow(task)
        await asyncio.to_thread(scope.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not scope.follow(task)

    asyncio.run(main())
    scope = CancelScope(CALLER, 0)
    scope.begin()
    scope.follow(task_of_a_closed_loop())
    scope.cancel()


def task_of_a_closed_loop():
    async def nothing():
        return asyncio.current_task()

    return asyncio.run(nothing())


def test_the_current_one(scope):
    assert current_scope() is None
    token = activate(scope)
    assert current_scope() is scope
    deactivate(token)
    assert current_scope() is None

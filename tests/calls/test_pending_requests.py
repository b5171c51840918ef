"""The table of pending requests, and which of them are dropped."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest

from zrpc.calls import pending_requests
from zrpc.calls.pending_requests import PendingRequests
from zrpc.membership.worker_info import WorkerInfo
from zrpc.wire.kind import Kind
from zrpc.wire.message import Message

CALLER = WorkerInfo("worker0", 0)


@pytest.fixture
def table() -> Any:
    return PendingRequests()


def request(call_id: Any, sender: int = 0, kind: Any = Kind.CALL, deadline: float = 0.0) -> Any:
    return Message(kind, call_id, deadline, b"body", sender=sender, attachments={1: "an RRef"})


def test_a_request_is_there_until_it_is_answered(table: Any) -> None:
    first, second = request(1), request(2)
    assert not table.accept(first, CALLER).cancelled
    table.accept(second, CALLER)
    assert len(table) == 2
    table.end(first)
    table.end(first)
    assert len(table) == 1


def test_one_that_is_cancelled_in_the_queue_is_freed(table: Any) -> None:
    message, other = request(1), request(1, sender=1)
    scope = table.accept(message, CALLER)
    table.accept(other, CALLER)
    table.cancel(0, 1)
    assert scope.cancelled
    assert not scope.begin()
    assert (message.body, message.attachments) == (b"", None)
    assert len(table) == 1
    assert other.body == b"body"  # of another caller, with the same id
    assert not other.scope.cancelled


def test_one_that_runs_keeps_its_message_and_its_place(table: Any) -> None:
    message = request(1)
    scope = table.accept(message, CALLER)
    assert scope.begin()
    table.cancel(0, 1)
    assert scope.abandoned
    assert message.body == b"body"
    assert len(table) == 1  # a shutdown waits for it
    assert not table.expire(time.monotonic())  # nothing is queued for it
    table.end(message)
    assert len(table) == 0


def test_a_deferred_request_does_not_count_once_its_caller_no_longer_waits(table: Any) -> None:
    ended = [request(1), request(2), request(3, sender=1), request(4, deadline=1)]
    ended.append(request(7, kind=Kind.REMOTE, deadline=1))
    counted = [request(5), request(6, kind=Kind.REMOTE, deadline=100)]
    for message in ended + counted:
        table.accept(message, CALLER)
        message.scope.begin()
    for message in [*ended[1:], *counted]:
        table.defer(message)
    assert len(table) == 7
    table.cancel(0, 1)
    assert len(table) == 7  # it still runs
    table.defer(ended[0])
    assert len(table) == 6
    table.cancel(0, 2)
    table.on_member_lost(1)
    table.expire(time.monotonic() + 2)
    assert table.all() == counted
    assert not ended[-1].scope.cancelled  # the value that it makes may still come
    table.end(ended[1])  # its future is done after all
    assert table.all() == counted


def test_a_cancellation_may_overtake_its_request(table: Any) -> None:
    table.cancel(0, 1)
    table.cancel(0, 2)
    assert table.accept(request(1), CALLER).cancelled
    assert not table.accept(request(2, sender=1), CALLER).cancelled
    assert not table.accept(request(3), CALLER).cancelled
    assert len(table) == 2


def test_the_number_of_remembered_cancellations_is_limited(table: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(pending_requests, "_MAX_EARLY_CANCELS", 10)
    for call_id in range(1, 100):
        table.cancel(0, call_id)
    assert len(table._early_cancels) == 10
    assert table.accept(request(99), CALLER).cancelled
    assert not table.accept(request(1), CALLER).cancelled


@pytest.mark.parametrize("kind", [Kind.REMOTE, Kind.BACKWARD])
def test_kinds_that_are_never_dropped(table: Any, kind: Any) -> None:
    message = request(1, kind=kind, deadline=1e-9)
    scope = table.accept(message, CALLER)
    table.cancel(0, 1)
    table.expire(time.monotonic())
    table.on_member_lost(0)
    assert not scope.cancelled
    assert scope.begin()
    assert message.body == b"body"
    assert len(table) == 1


def test_requests_expire(table: Any) -> None:
    now = time.monotonic()
    late = [request(1, deadline=50), request(2, deadline=100), request(3)]
    for message in late:
        table.accept(message, CALLER)
    assert not table.expire(now + 40)
    assert table.expire(now + 60)
    assert not table.expire(now + 70)  # reported once
    assert [message.scope.cancelled for message in late] == [True, False, False]
    earlier = request(4, deadline=1)
    table.accept(earlier, CALLER)
    assert table.expire(now + 61)
    assert earlier.scope.cancelled
    assert table.expire(now + 200)
    assert len(table) == 1


def test_a_lost_caller(table: Any) -> None:
    mine, others = request(1), request(1, sender=1)
    for message in (mine, others):
        table.accept(message, CALLER)
    table.cancel(0, 7)
    table.on_member_lost(0)
    assert mine.scope.cancelled
    assert not others.scope.cancelled
    assert not table._early_cancels


def test_ending_a_request_does_not_end_another_with_the_same_id(table: Any) -> None:
    """A restarted worker counts from 1 again."""
    old, new = request(1), request(1)
    table.accept(old, CALLER)
    old.scope.begin()
    table.accept(new, CALLER)
    table.end(old)
    assert len(table) == 1
    table.cancel(0, 1)
    assert new.scope.cancelled


def test_the_worker_leaves(table: Any) -> None:
    messages = [request(1), request(2)]
    for message in messages:
        table.accept(message, CALLER)
    messages[0].scope.begin()
    table.close()
    assert all(message.scope.cancelled for message in messages)


class Ending:
    """Garbage: when it is collected, another thread ends a request. Leaves the like behind."""

    def __init__(self, table: Any, requests: list[Message]) -> None:
        self._cycle = self
        self._table, self._requests = table, requests

    def __del__(self) -> None:
        if self._requests:
            ending = threading.Thread(target=self._table.end, args=(self._requests.pop(),))
            ending.start()
            ending.join()
            Ending(self._table, self._requests)


@pytest.mark.parametrize("how", ["on_member_lost", "expire", "close"])
def test_requests_may_end_while_all_are_gone_through(table: Any, how: str) -> None:
    """The garbage collector may run at any allocation, and a finalizer lets other threads run."""
    requests = [request(n, deadline=1e-6) for n in range(500)]
    for each in requests:
        table.accept(each, CALLER)
        each.scope.begin()
    kept = requests[0]
    args = {"on_member_lost": (0,), "expire": (time.monotonic() + 1,), "close": ()}[how]
    before = gc.get_threshold()
    gc.collect()  # frees the tuples that Python keeps: making one of these is no allocation
    Ending(table, requests)
    gc.set_threshold(1)
    try:
        getattr(table, how)(*args)
    finally:
        gc.set_threshold(*before)
        requests.clear()
    assert kept.scope.cancelled

"""The requests that are not answered: which are dropped, and which calls may begin at the end."""

from __future__ import annotations

from typing import Any

import pytest

from zrpc.calls.last_calls import LastCalls
from zrpc.calls.pending_requests import PendingRequests
from zrpc.errors import NotInitializedError
from zrpc.membership.worker_info import WorkerInfo
from zrpc.runtime.thread_pool import HandlerPool
from zrpc.wire.kind import Kind, Tag
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message

CALLER = MemberId(1)


@pytest.fixture
def requests() -> PendingRequests:
    return PendingRequests({CALLER: WorkerInfo("worker1", 1)})


def request(call_id: int, **more: Any) -> Message:
    return Message(Kind.CALL, call_id, sender=CALLER, **more)


def test_a_request_that_was_cancelled_before_it_came_is_dropped(requests: PendingRequests) -> None:
    requests.cancel(CALLER, 1)
    assert requests.accept(request(1)).cancelled
    assert not requests.accept(request(2)).cancelled
    assert len(requests) == 1


def test_requests_are_dropped_that_come_while_the_worker_leaves(requests: PendingRequests) -> None:
    before = requests.accept(request(1))
    requests.close()
    late = requests.accept(request(2))
    assert (before.cancelled, late.cancelled) == (True, True)
    assert not requests


def test_what_a_handler_leaves_behind_has_no_deadline_once_it_has_answered(
    requests: PendingRequests,
) -> None:
    answered, dropped = request(1, deadline=60.0), request(2, deadline=60.0)
    scopes = [requests.accept(each) for each in (answered, dropped)]
    requests.cancel(CALLER, 2)
    for each in (answered, dropped):
        requests.end(each)
    assert [scope.remaining() is None for scope in scopes] == [True, False]


def test_once_all_have_called_shutdown_a_thread_that_waits_for_none_of_its_calls_is_stopped(
    requests: PendingRequests,
) -> None:
    calls = LastCalls(requests, HandlerPool(1, "callbacks"), 60)
    requests.accept(request(1, attachments={Tag.HOPS: 1}))
    assert calls.check() == 2
    with pytest.raises(NotInitializedError, match="have called shutdown"):
        list(iter(calls.check, None))
    # Any number may be made for a handler that no such thread has brought about.
    requests.accept(request(2, attachments={Tag.HOPS: 0}))
    assert {calls.check() for _ in range(2000)} == {1}

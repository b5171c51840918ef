"""Which calls may begin once all workers have called shutdown."""

from __future__ import annotations

import pytest

from zrpc.calls.last_calls import LastCalls
from zrpc.calls.pending_requests import PendingRequests
from zrpc.errors import NotInitializedError
from zrpc.membership.worker_info import WorkerInfo
from zrpc.runtime.thread_pool import HandlerPool
from zrpc.wire.kind import Kind, Tag
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message

MANY = 2000


def while_a_handler_runs(hops: int) -> LastCalls:
    requests = PendingRequests({MemberId(1): WorkerInfo("worker1", 1)})
    request = Message(Kind.CALL, 1, 0.0, b"body", sender=1, attachments={Tag.HOPS: hops})
    requests.accept(request)
    return LastCalls(requests, HandlerPool(1, "callbacks"), 60)


def test_threads_that_work_for_a_handler_may_call_as_often_as_they_like() -> None:
    calls = while_a_handler_runs(hops=0)
    assert {calls.check() for _ in range(MANY)} == {1}


def test_threads_that_wait_for_none_of_their_calls_are_stopped_at_some_time() -> None:
    calls = while_a_handler_runs(hops=1)
    assert calls.check() == 2
    with pytest.raises(NotInitializedError, match="have called shutdown"):
        list(iter(calls.check, None))

"""The requests that a worker has not answered: which of them are dropped as they arrive."""

from __future__ import annotations

import pytest

from zrpc.calls.pending_requests import PendingRequests
from zrpc.membership.worker_info import WorkerInfo
from zrpc.wire.kind import Kind
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message

CALLER = MemberId(1)


@pytest.fixture
def requests() -> PendingRequests:
    return PendingRequests({CALLER: WorkerInfo("worker1", 1)})


def request(call_id: int) -> Message:
    return Message(Kind.CALL, call_id, sender=CALLER)


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

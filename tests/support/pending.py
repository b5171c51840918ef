"""Calls in a table, without a caller that sends them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zrpc.calls.pending_call import PendingCall
from zrpc.calls.pending_calls import PendingCalls
from zrpc.wire.member_id import MemberId, rank_of


class Callees:
    """The peers of the calls, which do nothing.

    Attributes:
        cancelled: the calls that they hear of.
        errands: what the table wants done in the next turn.
    """

    def __init__(self) -> None:
        self.lost: set[MemberId] = set()
        self.cancelled: list[PendingCall] = []
        self.errands: list[Callable[[], object]] = []

    def explain(self, _: MemberId, call_id: int) -> str:
        return ""

    def describe(self, peer: MemberId) -> str:
        return f"rank {rank_of(peer)}"

    def died(self, call: PendingCall) -> Exception:
        return call.died(f"peer {call.peer} is gone")

    def tell_cancelled(self, call: PendingCall) -> None:
        self.cancelled.append(call)


def table(limit: int = 0, callees: Any = None) -> PendingCalls:
    """Makes an empty table."""
    callees = callees or Callees()
    return PendingCalls(callees, limit, callees.errands.append)


def entered_call(calls: PendingCalls, peer: int, timeout: float, holds: Any = None) -> PendingCall:
    """Makes a call and enters it into the table, without a need for room."""
    call = PendingCall(calls, MemberId(peer), timeout)
    call.holds = holds
    calls.enter(call)
    return call


def queued(calls: PendingCalls) -> int:
    """Returns the number of calls that wait for room."""
    return sum(load.waiting for loads in calls.loads().values() for load in loads)


def bytes_in_flight(calls: PendingCalls) -> int:
    """Returns how many bytes flow control counts."""
    return sum(load.used for loads in calls.loads().values() for load in loads)

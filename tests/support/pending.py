"""Calls in a table, without a caller that sends them."""

from __future__ import annotations

from typing import Any

from zrpc.calls.pending_calls import PendingCall, PendingCalls
from zrpc.wire.member_id import MemberId


def entered_call(calls: PendingCalls, peer: int, timeout: float, holds: Any = None) -> PendingCall:
    """Makes a call and enters it into the table."""
    call = calls.new(MemberId(peer), timeout, holds)
    calls.enter(call)
    return call

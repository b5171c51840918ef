"""The wait of a thread for one call."""

from __future__ import annotations

import threading
from collections.abc import Callable

from zrpc.calls.pending_calls import PendingCall
from zrpc.runtime.thread_pool import pass_gate

__all__ = ["wait_until_settled"]


def wait_until_settled(
    call: PendingCall, receive: Callable[[threading.Lock, float], None] | None = None
) -> None:
    """Waits until a call is settled; at its deadline the current thread settles it.

    If an exception (Ctrl-C) interrupts the wait, this thread is no longer one of the `waiters`.
    For ``receive``, see `zrpc.runtime.thread_pool.pass_gate`.
    """
    ident = threading.get_ident()
    call.waiters = (*call.waiters, ident)
    try:
        while not pass_gate(call.gate, call.remaining(), receive):
            if not call.remaining():  # or its deadline was postponed meanwhile
                call.fail(call.timed_out())
                # If another thread has taken the call from the table, it settles the call at once.
                pass_gate(call.gate)
    except BaseException:
        call.waiters = tuple(each for each in call.waiters if each != ident)
        raise

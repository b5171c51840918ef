"""Futures that are settled in a way that the test chooses, and what they hold."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import zrpc as rpc
from tests.support.pending import entered_call, table
from tests.support.waiting import SOON
from zrpc.calls.pending_call import PendingCall
from zrpc.runtime.thread_pool import pass_gate


class Calling:
    """Stands for the caller of a future's call; its outcome is the value."""

    def __init__(
        self,
        receive: Callable[[threading.Lock, float], None] | None = None,
        complete: Callable[[Callable[[], None]], None] = lambda job: job(),
    ) -> None:
        self.receive = receive
        self.complete = complete

    def wait(self, call: PendingCall) -> None:
        call.waiters = (threading.get_ident(),)
        pass_gate(call.gate, SOON, self.receive)

    def in_next_turn(self, errand: Callable[[], object]) -> None:
        errand()

    def decode(self, outcome: Any) -> Any:
        return outcome


def settled_in_wait(outcome: Any) -> rpc.Future[Any]:
    """The future of a call that is settled as soon as a thread waits for it, which completes it."""
    call = entered_call(table(), peer=0, timeout=SOON)
    return rpc.Future.of_call(call, Calling(receive=lambda gate, timeout: call.fail(outcome)))


def caught(future: Any) -> Any:
    """The class of a future's error."""
    try:
        future.value()
    except BaseException as error:
        return type(error)
    return None


def chain(first: Any, length: int) -> Any:
    for _ in range(length):
        first = first.then(lambda f: f.wait() + 1)
    return first


def result_within(future: Any, seconds: float) -> Any:
    """The future's value, waited for in a way that a future that stays open can't hold up."""
    done = threading.Event()
    future.add_done_callback(lambda f: done.set())
    assert done.wait(seconds)
    return future.value()

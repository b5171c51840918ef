"""The message that an RRef has come to its owner goes with the answer, if that is soon."""

from __future__ import annotations

from typing import Any

import zrpc
from tests.support.gates import Gate
from tests.support.waiting import until
from zrpc.testing import Mesh


def take(rref: Any) -> Any:
    return rref.local_value()


def test_the_answer_to_a_call_brings_the_receipt_of_its_rref(caller: Mesh) -> None:
    rref = zrpc.remote("worker1", int, args=("7",))
    until(rref.confirmed_by_owner, "confirmed")
    received = caller.agent(0).dispatcher.received

    def takes_one_message() -> bool:
        before = sum(received.values())
        assert zrpc.rpc_sync("worker1", take, args=(rref,)) == 7
        return (
            sum(received.values()) == before + 1
        )  # if the handler takes longer, it comes by itself

    until(takes_one_message, "one message comes for a call")


def test_the_receipt_does_not_wait_for_a_long_handler(caller: Mesh) -> None:
    with Gate() as gate:
        call = zrpc.rpc_async("worker1", gate.wait_inside, args=(zrpc.remote("worker1", int),))
        gate.await_entry()
        until(lambda: zrpc.stats().rrefs_held == 0, "the RRef that was given has ended")
    assert call.wait().owner_name() == "worker1"

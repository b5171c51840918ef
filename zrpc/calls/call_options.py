"""What few calls need, beside the worker, the function and its arguments."""

from __future__ import annotations

from typing import Any, Protocol, TypedDict

from zrpc.calls.pending_call import PendingCall, State
from zrpc.calls.pending_calls import PendingCalls
from zrpc.errors import WorkerDied
from zrpc.wire.devices import DeviceMap
from zrpc.wire.message import Extensions, Message


class Order(Protocol):
    """Puts calls into the table in an order of its own; see `zrpc.services.actors.order`."""

    def enter(self, calls: PendingCalls, call: PendingCall, message: Message) -> State:
        """Enters a call; returns SENDING, or UNSENT if it is settled already."""


class CallOptions(TypedDict, total=False):
    """What few calls need.

    Attributes:
        extension: a tag and bytes that travel outside of the pickle.
        holds: lives until the call is settled.
        died: the error if the peer is lost first.
        order: numbers the call and puts it into the table, instead of flow control.
        more: further extensions, if there is one.
        devices: where tensors arrive, if not by the device map for the callee.
    """

    extension: tuple[int, bytes] | None
    holds: Any
    died: type[WorkerDied]
    order: Order | None
    more: Extensions
    devices: DeviceMap

"""How RRefs travel: each message that brings one makes a fork of it."""

from __future__ import annotations

from functools import partial
from typing import Any

from zrpc.actors import ActorLabel
from zrpc.errors import RpcError
from zrpc.services.rref.messages import FORK_SIZE, NO_FORK, Fork, ForkId
from zrpc.wire.kind import Tag
from zrpc.wire.message import Message
from zrpc.wire.pickling import encoder
from zrpc.wire.unpickling import decoder


def reduce_rref(rref: Any) -> Any:
    """Returns how an RRef is pickled in the message that is being packed."""
    message = encoder()
    service = rref._service
    if message is None or message.owner is not service.agent:
        raise RpcError(
            f"Can not pickle rref in python pickler, rref can only be pickled when using RPC, by "
            f"the worker that has it ({service.agent.worker_info})"
        )
    if message.holes is not None:
        return message.holes.leave_out(rref)
    owner, parent = rref.owner().member_id, rref._fork_id or NO_FORK
    fork = Fork(rref._rref_id, service.new_id(), owner, parent)
    with service.lock:  # also for the first step: no handler's exception comes in between
        message.undo(partial(service.dropped.append, fork))
        service.references.fork(fork, message.destination)
    forks = message.extension(Tag.FORKS)
    forks.extend(fork.pack())
    place = len(forks) // FORK_SIZE - 1
    return _receive_rref, (place,) if rref._order is None else (place, *rref._order.label)


def receive_forks(service: Any, message: Message, data: bytes) -> list[tuple[ForkId, Any]]:
    """Makes the handles of the forks in a message, even if it will never be unpickled."""
    forks = Fork.unpack_all(data)
    for fork in forks:
        if fork.owner not in service.agent.membership.infos:
            service.agent.peers.recall(fork.owner)
    received: list[Fork] = []
    handles: list[tuple[ForkId, Any]] = []
    try:
        with service.lock:
            for fork in forks:
                try:
                    service.references.receive(fork, message.sender)
                except Exception:  # no memory for its frame, for example: it did nothing
                    service.references.receive(fork, message.sender)
                received.append(fork)
        service.settle_references()
        for fork in forks:
            value = service.find_value(fork.rref_id) if fork.owner == service.member else None
            handles.append((fork.fork_id, service.make_handle(service, fork, value)))
    except BaseException:  # no memory; those that were received were so nevertheless
        if received:
            message.attachments = {}
        for rref_id, fork_id, owner, _ in received[len(handles) :]:
            service.dropped.append((rref_id, None if owner == service.member else fork_id))
        raise
    return handles


def _receive_rref(index: int, *label: Any) -> Any:
    attachments = decoder().message.attachments or {}
    _, rref = attachments[Tag.FORKS][index]
    if label and rref._order is None:
        rref._number_calls(ActorLabel(*label))
        rref.owner()  # may have moved
    return rref

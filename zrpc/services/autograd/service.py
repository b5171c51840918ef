"""Distributed autograd of one agent.

Every message within a context carries the context's id in an extension, and which of its tensors
belong to the graph. If there are such tensors, the sender appends a `Send` node to its chain and
the receiver a `Receive` node.

Contexts are in ``zrpc.services.autograd.contexts``, these messages in
``zrpc.services.autograd.message_hooks``, and backward passes in
``zrpc.services.autograd.passes``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from typing_extensions import override

from zrpc.agent.agent import Agent
from zrpc.agent.current import current_agent
from zrpc.agent.service import ExtensionReader, Handler, Service
from zrpc.calls.message_hooks import MessageHooks
from zrpc.errors import RpcError
from zrpc.membership.worker_info import WorkerInfo
from zrpc.services.autograd.contexts import PASS_LAYOUT, Contexts
from zrpc.services.autograd.message_hooks import Crossing
from zrpc.services.autograd.passes import Passes
from zrpc.services.rref.service import BackwardOfValue
from zrpc.wire.kind import Kind, Tag
from zrpc.wire.member_id import MemberId

__all__ = ["AutogradService"]


class AutogradService(Service, BackwardOfValue):
    """Plugs distributed autograd into an agent that has RRefs.

    Attributes:
        contexts: the contexts that this worker takes part in.
        passes: the backward passes that it takes part in.
    """

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self.contexts = Contexts(agent)
        self.passes = Passes(agent, self.contexts)
        self._crossing = Crossing(self.contexts)

    @override
    def handlers(self) -> Mapping[Kind, Handler]:
        return {**self.contexts.handlers(), **self.passes.handlers()}

    @override
    def extension_readers(self) -> Mapping[Tag, ExtensionReader]:
        return {
            Tag.GRAPH: self._crossing.read_graph,
            Tag.PASS: lambda _, data: PASS_LAYOUT.unpack(data),
        }

    @override
    def message_hooks(self) -> MessageHooks:
        return self._crossing

    @override
    def tick(self) -> None:
        self.passes.tick()

    @override
    def awaited_members(self) -> Collection[MemberId]:
        return self.passes.linked_members()

    @override
    def on_messages_lost(self, member: MemberId) -> None:
        self.passes.on_messages_lost(member)
        self.contexts.on_messages_lost(member)

    def __len__(self) -> int:
        """Returns how many contexts this worker takes part in."""
        return len(self.contexts)

    @override
    def stats(self) -> Mapping[str, int]:
        return {"autograd_contexts": len(self)}

    @override
    def backward_of_value(
        self, owner: WorkerInfo, rref: Any, context_id: int, retain_graph: bool
    ) -> None:
        if owner.member_id == self.agent.worker_info.member_id:
            _backward_at_owner(rref, context_id, retain_graph)
            return
        if context_id < 0:
            raise RpcError("User RRefs require 'dist_autograd_ctx_id' to be specified")
        body: Any = (_backward_at_owner, (rref, context_id, retain_graph), {})
        self.agent.caller.call(owner, Kind.CALL, body, -1)

    @override
    def on_member_lost(self, member: MemberId) -> None:
        self.contexts.on_member_lost(member)
        self.passes.on_member_lost(member)

    @override
    def close(self) -> None:
        self.contexts.close()


def _backward_at_owner(rref: Any, context_id: int, retain_graph: bool) -> None:
    value = rref.local_value()
    if not isinstance(value, torch.Tensor):
        raise RpcError("RRef should contain a tensor for .backward()")
    if context_id < 0:
        value.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
    else:
        current_agent().service(AutogradService).passes.backward(context_id, [value], retain_graph)

"""Distributed autograd of one agent: what contexts say to each other, and backward passes.

Every message within a context says so in an extension, and which of its tensors belong to the
graph. Where tensors do, the sender appends a `Send` node to its chain and the receiver a
`Receive` node.

Contexts are in ``zrpc.autograd.contexts``, these messages in ``zrpc.autograd.crossing``, and
backward passes in ``zrpc.autograd.passes``.
"""

from __future__ import annotations

from typing import Any

import torch

from zrpc.agent import Agent
from zrpc.autograd.contexts import Contexts
from zrpc.autograd.crossing import Crossing
from zrpc.autograd.passes import Passes
from zrpc.current import current_agent
from zrpc.errors import RpcError, WorkerDied
from zrpc.rref.layer import RRefLayer
from zrpc.wire.kind import Kind
from zrpc.worker_info import WorkerInfo, rank_of

__all__ = ["AutogradLayer", "plug_in"]


class AutogradLayer:
    """Plugs distributed autograd into an agent.

    Args:
        agent: the agent; this layer registers its handlers there.

    Attributes:
        contexts: those that live at this worker.
        passes: the backward passes that it takes part in.
    """

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.contexts = Contexts(agent)
        self.passes = Passes(agent, self.contexts)
        Crossing(agent, self.contexts, self.passes)

    def __len__(self) -> int:
        """How many contexts live at this worker."""
        return len(self.contexts)

    def backward_of_value(
        self, owner: WorkerInfo, rref: Any, context_id: int, retain_graph: bool
    ) -> None:
        """Runs a backward pass from the value of an RRef; see `RRef.backward`."""
        if owner.number == self.agent.worker_info.number:
            _backward_at_owner(rref, context_id, retain_graph)
            return
        if context_id < 0:
            raise RpcError("User RRefs require 'dist_autograd_ctx_id' to be specified")
        body: Any = (_backward_at_owner, (rref, context_id, retain_graph), {})
        self.agent.caller.call(owner, Kind.CALL, body, -1)

    def lose(self, rank: int) -> None:
        """A peer is gone: so are its contexts, and passes that it took part in fail."""
        for state in self.contexts.living():
            self.contexts.enlist(state, rank)
        why = self.agent.why_gone(rank)
        self.passes.fail_with(
            rank, WorkerDied(f"Error on Node {rank_of(rank)}: during a backward pass, {why}")
        )

    def quiet(self) -> bool:
        """Passes are requests, which the agent counts itself."""
        return True

    def close(self) -> None:
        """Drops all contexts, and ends the waits of passes under way."""
        self.contexts.close()


def plug_in(agent: Agent) -> AutogradLayer:
    """Plugs distributed autograd into an agent that has RRefs, see `join_mesh`."""
    layer = AutogradLayer(agent)
    agent.layer(RRefLayer).backward = layer.backward_of_value
    return layer


def _backward_at_owner(rref: Any, context_id: int, retain_graph: bool) -> None:
    value = rref.local_value()
    if not isinstance(value, torch.Tensor):
        raise RpcError("RRef should contain a tensor for .backward()")
    if context_id < 0:
        value.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
    else:
        current_agent().layer(AutogradLayer).passes.backward(context_id, [value], retain_graph)

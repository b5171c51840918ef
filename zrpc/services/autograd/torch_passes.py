"""torch's own passes for the gradients of some inputs: which of them would be incomplete.

torch's ``backward`` fails at a `Receive` node. But ``torch.autograd.grad`` and
``backward(inputs=...)`` visit only what leads to an input in this worker's part of the graph. So a
gradient that goes through another worker would be missing, without an error. If none does, such a
pass is right: a handler may compute the gradients of its own parameters, or those of tensors that
it has received.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from zrpc.services.autograd.dependencies import UsedTensors
from zrpc.services.autograd.nodes import RECEIVE_NODE
from zrpc.services.autograd.state import ContextState
from zrpc.torch_internals import ACCUMULATE_NODE
from zrpc.wire.member_id import MemberId

# A node, and the number of one of its outputs.
_Edge = tuple[Any, int]


def is_incomplete(
    state: ContextState, own: MemberId, roots: Iterable[Any], inputs: Iterable[Any]
) -> bool:
    """Returns whether what was sent leads from an input to the roots, by other workers.

    It may be true by mistake if messages don't tell enough, or for an input that is no leaf.

    Args:
        state: of a context.
        own: this worker.
        roots: tensors, or edges of torch's graph.
        inputs: as ``roots``.
    """
    received = _received(state, _ends(map(_edge, roots)))
    if not received:
        return False
    used = UsedTensors(state.carried)
    used.learn(own, state.sources())
    for each in inputs:
        ends = list(_ends([_edge(each)]))
        before = _received(state, ends)
        leaves = [
            state.tracer.bit_of(node) for node, _ in ends if node.__class__ is ACCUMULATE_NODE
        ]
        if 0 in leaves:
            continue  # nothing that was sent was computed from it
        wanted = before | sum(leaves)
        # What an input was computed from does not depend on it.
        used.use(own, state.tracer.arrived(received & ~before))
        if used.to_ask():
            return True
        for number, places in used.sent.get(own, {}).items():
            sent = [state.sends.get((number, place)) for place in places]
            if any(each is not None and each.reach & wanted == wanted for each in sent):
                return True
    return False


def _edge(tensor: Any) -> _Edge:
    if isinstance(tensor, torch.Tensor):
        tensor = torch.autograd.graph.get_gradient_edge(tensor)
    return tensor.node, tensor.output_nr


def _ends(edges: Iterable[_Edge]) -> Iterator[_Edge]:
    """Yields the received tensors and the leaves that lead to others, as edges.

    Not by the tracer of a context: it would keep the nodes of all graphs that it has seen.
    """
    ahead, seen = list(edges), set[_Edge]()
    while ahead:
        edge = ahead.pop()
        node = edge[0]
        ends = node.__class__ in (RECEIVE_NODE, ACCUMULATE_NODE)
        key = edge if ends else (node, 0)
        if node is None or key in seen:
            continue
        seen.add(key)
        if ends:
            yield edge
        else:
            ahead += node.next_functions


def _received(state: ContextState, ends: Iterable[_Edge]) -> int:
    received = [edge for edge in ends if edge[0].__class__ is RECEIVE_NODE]
    found = 0
    for each in state.tracer.reach_of(received):
        found |= each
    return found

"""The nodes that messages add to autograd's graph, and those that put a pass in order.

A `Send` node hangs above each tensor that this worker has sent, and a `Receive` node below the
tensors of each message that it has received. Nothing leads from a `Receive` to a `Send`: of what
was sent, a pass runs only what leads to its roots.

So the order needs nodes of its own, the *turns*. These are made for one pass: one for each message
whose gradients it needs, each leading to the one before and to the `Send` nodes of its message. A
turn is the node of an addition, with a hook that waits for the gradients. torch's engine runs a
node with a lower sequence number only if no other node is ready, and a turn has the lowest. So when
it waits, everything that this worker can do first is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from zrpc.services.autograd.node_hooks import OwnHook
from zrpc.wire.member_id import MemberId

__all__ = [
    "ACCUMULATE_NODE",
    "NO_GRADIENT",
    "RECEIVE_NODE",
    "Gradients",
    "Receive",
    "Send",
    "append_turn",
    "new_token",
    "recorded",
    "without_gaps",
]

Gradients = Sequence[torch.Tensor | None]

# A gradient with gaps is sent without them if it has at most this number of elements.
_MAX_FILLED = 4096

T = TypeVar("T")


def recorded(apply: Callable[..., T], *args: Any) -> T:
    """Calls ``apply(*args)`` with grad enabled; almost always it is already."""
    if torch.is_grad_enabled():
        return apply(*args)
    with torch.enable_grad():
        return apply(*args)


def new_token(requires_grad: bool = False) -> torch.Tensor:
    """Returns a tensor that stands for the order of nodes; the thread's defaults don't matter."""
    return torch.zeros(1, dtype=torch.float32, device="cpu", requires_grad=requires_grad)


# The gradient of each token. Nothing writes to it: the engine adds in place only to what it alone
# refers to.
NO_GRADIENT = new_token()


class _Node(torch.autograd.Function):
    """A node of one graph only: its ``backward`` is not differentiated."""

    # Without torch's Python around the C function, which looks for tensors of torch.func: these
    # can't be sent.
    apply = torch._C._FunctionBase.__dict__["apply"]


class Send(_Node):
    """``(tensor, take, send_id, index) -> exit``: a tensor leaves this worker."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        take: Callable[[int, int], torch.Tensor | None],
        send_id: int,
        index: int,
    ) -> torch.Tensor:
        """Returns a token, from which a pass begins."""
        ctx.take = take
        ctx.place = send_id, index
        ctx.set_materialize_grads(False)
        return NO_GRADIENT.detach()  # takes a quarter of the time of a new token

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor | None) -> Any:
        """Returns the gradient that the receiver has sent back."""
        return ctx.take(*ctx.place), None, None, None


class Receive(_Node):
    """``(start, send_back, context_id, sender, send_id, tensors) -> tensors``: they have come here.

    The tensors are not inputs of the node. So its outputs are not views of inputs, and may be
    changed in place. ``start`` is the leaf of the context at which the engine's runs end.
    """

    @staticmethod
    def forward(
        ctx: Any,
        start: torch.Tensor,
        send_back: Callable[[int, MemberId, int, Gradients], None],
        context_id: int,
        sender: MemberId,
        send_id: int,
        tensors: list[torch.Tensor],
    ) -> Any:
        """Returns the tensors as part of the graph."""
        ctx.send_back = send_back
        ctx.context_id = context_id
        ctx.origin = sender, send_id
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        """Sends the gradients back."""
        ctx.send_back(ctx.context_id, *ctx.origin, gradients)
        return NO_GRADIENT, None, None, None, None, None


_SEND_NODE: Any = Send._backward_cls
RECEIVE_NODE: Any = Receive._backward_cls
# The class of the nodes that add up the gradients of leaves.
_view: Any = torch.empty(0, requires_grad=True).view(0)
ACCUMULATE_NODE: Any = type(_view.grad_fn.next_functions[0][0])
# The nodes' names in profiles and in `grad_fn`, which are torch's.
_SEND_NODE.__name__ = "SendRpcBackward"
RECEIVE_NODE.__name__ = "RecvRpcBackward"
# What torch's engine calls, without torch's search for it in each run.
_SEND_NODE.apply = Send.backward
RECEIVE_NODE.apply = Receive.backward


def append_turn(token: torch.Tensor, wait: OwnHook, exits: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the token of a pass that waits with ``wait`` before it runs what leads to ``token``.

    Args:
        token: that of the turn before, or the start of the context.
        wait: waits for the gradients of ``exits``; it is a hook of the turn's node.
        exits: the results of `Send` for the tensors of one message.
    """
    for each in exits:
        token = recorded(torch.add, token, each)
        node: Any = token.grad_fn
        node._set_sequence_nr(1)
    node._set_sequence_nr(0)  # `Tracer` keeps all other nodes from having this number
    node.register_prehook(wait)
    return token


def without_gaps(gradients: Gradients) -> list[torch.Tensor | None]:
    """Returns gradients to send, the small ones without gaps: so they need no tensor table.

    That of a sum, say, is one element of memory, which all elements of the gradient share.
    """
    return [
        each.contiguous()
        if each is not None and each.layout is torch.strided and each.numel() <= _MAX_FILLED
        else each
        for each in gradients
    ]

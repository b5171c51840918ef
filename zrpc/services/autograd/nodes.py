"""The nodes that messages add to autograd's graph, and those that put a pass in order.

A `Send` node hangs above the tensors of each message that this worker has sent, and a `Receive`
node below those of each message that it has received. Nothing leads from a `Receive` to a `Send`:
of what was sent, a pass runs only what leads to its roots.

So the order needs nodes of its own, the *waits*. These are made for one pass: one for each message
whose gradients it needs, each leading to the one before and to the `Send` node of its message. A
wait is the node of an addition, with a hook that waits for the gradients. torch's engine runs a
node with a lower sequence number only if no other node is ready, and a wait has the lowest. So when
it waits, everything that this worker can do first is done.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch.autograd.function import once_differentiable

from zrpc.errors import RpcError
from zrpc.runtime.interrupts import uninterrupted
from zrpc.torch_internals import (
    EngineLocal,
    any_hook_before,
    apply_function,
    node_class_of,
    rank_last,
    rank_second_last,
    saved_without_memory,
    sequence_number,
    wrap_hook_registration,
)
from zrpc.wire.devices import to_device
from zrpc.wire.member_id import MemberId

Gradients = Sequence[torch.Tensor | None]

# The places of tensors in a message, each with the tensor's device.
_Places = Sequence[tuple[int, torch.device]]

# A gradient with gaps is sent without them if it has at most this number of elements.
_MAX_FILLED = 4096

T = TypeVar("T")


class OwnHook(partial[Any]):
    """A hook of zrpc's own on a node: a function, with its first arguments."""


# A node does not list its hooks. To find out whether it has any, one must be added and removed
# again, for each leaf in each pass. But torch calls a function in Python for each hook that
# Python adds to a node. So a wrapper around that function notes all hooks, and as long as there
# are none, no node is looked at. Most programs have hooks on tensors only, or hooks of modules
# for the forward pass, which don't count here. Full backward hooks of modules do: torch hangs
# them on nodes of each graph.
#
# The dictionaries of hooks that nodes have, by their ids. A dictionary lives as long as its node.
# Single operations on the dict are atomic.
_noted: dict[int, weakref.ref[dict[int, Any]]] = {}


def _noting(register: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(hooks: Any, hook: Any) -> Any:
        hooks, handle = register(hooks, hook)
        if not isinstance(hook, OwnHook) and id(hooks) not in _noted:
            key = id(hooks)
            _noted[key] = weakref.ref(hooks, lambda _: _noted.pop(key, None))
        return hooks, handle

    return wrapper


def _install() -> bool:
    """Notes all hooks from now on; returns whether it works, and whether there were none before."""
    none_before = not any_hook_before()
    wrap_hook_registration(_noting)
    node: Any = torch.ones(1, requires_grad=True).view(1).grad_fn
    for register in (node.register_hook, node.register_prehook):
        register(print)
    return none_before and len(_noted) == 2


def any_registered() -> bool:
    """Returns whether any node may have a hook other than zrpc's own."""
    return not _complete or bool(_noted and any(each() for each in list(_noted.values())))


_complete = _install()


class Run(Protocol):
    """What nodes call in a pass. They don't refer to it: the collector sees no cycle in C++.

    Attributes:
        context_id: the context of the pass.
    """

    context_id: int

    def gradients_of(self, send_id: int) -> Gradients:
        """Returns the gradients of all tensors that were sent in a message; () if it has none."""

    def send_gradients(self, sender: MemberId, send_id: int, gradients: Gradients) -> None:
        """Sends the gradients of tensors that were received; by the CPU."""


# The pass that this thread runs. Unlike a ContextVar, it holds in the threads of torch's engine as
# well, which run the nodes of devices.
running: EngineLocal[Run] = EngineLocal("zrpc_autograd_run")


def _current_run() -> Run:
    run = running.get()
    if run is None:
        raise torch_pass_error("torch's own backward")
    return run


def torch_pass_error(found: str) -> RpcError:
    """Returns the error of a pass of torch's own, which stops at what other workers have sent."""
    return RpcError(
        f"expected zrpc.autograd.backward(context_id, roots), found {found}: tensors that came "
        "from another worker within a context have gradients there"
    )


def recorded(apply: Callable[..., T], *args: Any) -> T:
    """Calls ``apply(*args)`` with grad enabled; almost always it is already."""
    if torch.is_grad_enabled():
        return apply(*args)
    with torch.inference_mode(False), torch.enable_grad():
        return apply(*args)


# The gradient of each tensor that stands for the order of nodes. Nothing writes to it: the engine
# adds in place only to what it alone refers to. The defaults of a thread don't matter.
NO_GRADIENT = torch.zeros(1, dtype=torch.float32, device="cpu")


def new_start() -> torch.Tensor:
    """Returns a leaf at which the runs of a context end."""
    return NO_GRADIENT.detach().requires_grad_()


class _Node(torch.autograd.Function):
    """A node of one graph only: its ``backward`` is not differentiated."""

    apply = apply_function  # tensors of torch.func can't be sent


class Send(_Node):
    """``(send_id, places, *tensors) -> exit``: tensors leave this worker, in one message."""

    @staticmethod
    def forward(ctx: Any, send_id: int, places: _Places, *tensors: torch.Tensor) -> torch.Tensor:
        """Returns a tensor from which a pass begins."""
        ctx.send_id, ctx.places = send_id, places
        ctx.materialize_grads = False
        if len(tensors) > 1:
            ctx.save_for_backward(*tensors)
        return NO_GRADIENT.detach()  # takes a quarter of the time of a new one

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor | None) -> Any:
        """Returns the gradients that the receiver has sent back, on the devices of the tensors."""
        sent = _current_run().gradients_of(ctx.send_id)
        gradients = []
        for index, device in ctx.places:
            gradient = sent[index] if sent else None
            if gradient is not None and gradient.device != device:
                gradient = to_device(gradient, str(device))
            gradients.append(gradient)
        return None, None, *gradients


def new_exit(send_id: int, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the result of `Send` for all tensors of a message, whose memory it does not keep."""
    return _exit(send_id, [(i, tensor.device) for i, tensor in enumerate(tensors)], tensors)


def exit_of(exit_: torch.Tensor, indices: Sequence[int]) -> torch.Tensor:
    """Returns the result of `Send` for some tensors of a message, from that for all of them.

    A node leads to all of its tensors, and a pass must not run what leads to the others.
    """
    node: Any = exit_.grad_fn
    if len(indices) == len(node.places):
        return exit_
    tensors, places = node.saved_tensors, node.places
    return _exit(node.send_id, [places[i] for i in indices], [tensors[i] for i in indices])


def _exit(send_id: int, places: _Places, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    exit_: torch.Tensor
    if len(tensors) == 1:
        exit_ = recorded(Send.apply, send_id, places, *tensors)
    else:
        # A handler that raised before the end could leave the thread in this state.
        with uninterrupted, saved_without_memory(NO_GRADIENT):
            exit_ = recorded(Send.apply, send_id, places, *tensors)
    if not sequence_number(exit_.grad_fn):
        rank_second_last(exit_.grad_fn)
    return exit_


class Receive(_Node):
    """``(start, context_id, sender, send_id, tensors) -> tensors``: they have come here.

    The tensors are not inputs of the node. So its outputs are not views of inputs, and may be
    changed in place. ``start`` is the leaf of the context at which the engine's runs end.
    """

    @staticmethod
    def forward(
        ctx: Any,
        start: torch.Tensor,
        context_id: int,
        sender: MemberId,
        send_id: int,
        tensors: list[torch.Tensor],
    ) -> Any:
        """Returns the tensors as part of the graph."""
        ctx.context_id = context_id
        ctx.origin = sender, send_id
        ctx.materialize_grads = False
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        """Sends the gradients back."""
        sender, send_id = ctx.origin
        _current_run().send_gradients(sender, send_id, gradients)
        return NO_GRADIENT, None, None, None, None


_SEND_NODE = node_class_of(Send)
RECEIVE_NODE = node_class_of(Receive)
# The nodes' names in profiles and in `grad_fn`, which are torch's.
_SEND_NODE.__name__ = "SendRpcBackward"
RECEIVE_NODE.__name__ = "RecvRpcBackward"
# What torch's engine calls, without torch's search for it in each run.
_SEND_NODE.apply = Send.backward
RECEIVE_NODE.apply = Receive.backward


def append_wait(last: torch.Tensor, wait: OwnHook, exit_: torch.Tensor) -> torch.Tensor:
    """Returns a tensor whose node calls ``wait`` before the engine runs what leads to ``last``.

    Args:
        last: the result for the message before, or the start of the context.
        wait: waits for the gradients of ``exit_``; it is a hook of the node.
        exit_: the result of `Send` for the tensors of one message.
    """
    last = recorded(torch.add, last, exit_)
    node: Any = last.grad_fn
    rank_last(node)  # `Tracer` and `_exit` keep all other nodes from having this number
    node.register_prehook(wait)
    return last


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


# torch's engine runs the nodes of an accelerator in a thread of its own, and all other nodes in the
# thread that began. If that one waited for another worker while the accelerator computes, it could
# not run what the accelerator's thread hands to it, for which the other worker may wait.
#
# But a node may begin a run of its own, and its thread takes part in all runs until that one is
# done. So a node that must not wait yet begins small runs that visit the accelerator's thread.
class _Visit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, start: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Returns an empty tensor there, so that the node runs in that thread."""
        return torch.empty(0, device=device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Returns an empty gradient."""
        return torch.empty(0, device="cpu"), None


def visit_accelerator() -> bool:
    """Runs nodes that are ready for this thread while the accelerator's thread is visited.

    Called by a node. Returns False if this process has no accelerator.
    """
    device = torch.accelerator.current_accelerator()
    if device is None or not torch.accelerator.is_available():
        return False
    with torch.enable_grad():
        start = torch.empty(0, device="cpu", requires_grad=True)
        end = _Visit.apply(start, device)  # type: ignore[no-untyped-call]
    torch.autograd.grad(end, start, torch.empty(0, device=device))
    return True

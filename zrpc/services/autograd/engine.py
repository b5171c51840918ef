"""One worker's part of a backward pass: a single run of torch's engine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

import torch
from torch.autograd.graph import GradientEdge

from zrpc.services.autograd.accumulation import Accumulation, must_run
from zrpc.services.autograd.nodes import NO_GRADIENT
from zrpc.services.autograd.state import ContextState
from zrpc.torch_internals import base_of, run_backward, storage_uses, tensor_uses

__all__ = ["check_roots", "run"]


def check_roots(roots: Sequence[torch.Tensor]) -> None:
    """Raises torch's errors for roots from which no backward pass can begin.

    Raises:
        RuntimeError: there are none, or one requires no grad, is not a scalar, or is a leaf.
        TypeError: ``roots`` is not a list of tensors.
    """
    if not isinstance(roots, list | tuple) or not all(isinstance(r, torch.Tensor) for r in roots):
        raise TypeError(
            "backward(): incompatible function arguments: expected context_id: int, roots: "
            f"List[Tensor], retain_graph: bool = False, but got roots of {type(roots).__name__}"
        )
    if not roots:
        raise RuntimeError("No tensors provided for gradient computation.")
    for root in roots:
        if not root.requires_grad:
            raise RuntimeError("requires_grad not set on root")
        if root.numel() != 1:
            raise RuntimeError(f"{root.shape} is not a scalar, all roots need to be scalar")
        if root.grad_fn is None:
            raise RuntimeError("root does not have a valid gradient function")


def run(
    roots: Sequence[torch.Tensor],
    last: torch.Tensor,
    retain_graph: bool,
    state: ContextState,
    reach: int = 0,
) -> None:
    """Runs the graph of the roots, each with a gradient of one, and of ``last`` once.

    ``last`` is ``state.start`` if nothing that was sent leads to the roots of the pass, and
    ``reach`` is what it leads to, as a set of the context's tracer. The gradients of the leaves are
    added to those of the context.
    """
    start = state.start
    waits = () if last is start else (last,)
    if not waits and not roots:
        return
    for root in roots:
        reach |= state.tracer.reach(root)
    state.tracer.forget()
    accumulators = state.tracer.leaves(reach)
    variables = [node.variable for node in accumulators]
    # The nodes of the graph, not the leaves: a leaf has another node if its dtype was changed since
    # then, and is refused if it was frozen. With the start among them the engine also runs the
    # parts that lead to no leaf: the gradients of each tensor that was received must be sent.
    inputs = *(GradientEdge(node, 0) for node in accumulators), start
    gradients = *map(torch.ones_like, roots), *[NO_GRADIENT] * len(waits)
    execute = partial(run_backward, allow_unreachable=True)
    options = retain_graph, False, inputs  # False: create_graph
    if must_run(variables):
        with Accumulation(state, accumulators) as accumulation:
            begins = [accumulation.begin_at(root) for root in roots]
            if not roots:  # a root's node comes first: see `append_wait`
                accumulation.begin_with(last)
            execute((*begins, *waits), gradients, *options, accumulate_grad=True)
        _add(state, accumulation.taken)
    else:
        found = execute((*roots, *waits), gradients, *options, accumulate_grad=False)
        taken = list(zip(variables, found, strict=False))
        del found  # nothing else may refer to the gradients
        _add(state, taken)


def _add(state: ContextState, found: list[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    """Adds the gradients of leaves to those of the context; takes them out of the list."""
    # As in torch, gradients of which there are copies live until all are added. So no copy has the
    # memory in which a hook has seen a gradient.
    own, shared = [], []
    while found:
        leaf, gradient = found.pop()
        if gradient is None or not leaf.requires_grad:  # as in torch's AccumulateGrad
            continue
        uses = _uses(gradient)  # in a statement of its own, which adds no reference to it
        if _is_unshared(gradient, uses):
            own.append((leaf, gradient.detach()))
        else:
            own.append((leaf, gradient.clone()))
            shared.append(gradient)
    state.add_gradients(own)


def _is_unshared(gradient: torch.Tensor, uses: tuple[int, ...]) -> bool:
    """Returns whether nothing else uses a gradient's memory, so that it may be changed in place.

    torch's AccumulateGrad also takes over such a gradient, and copies others. ``uses`` are the
    gradient's `_uses` when it was found.
    """
    if gradient.layout is not torch.strided:
        return False
    storage = gradient.untyped_storage()
    is_view = base_of(gradient) is not None
    # One reference is the gradient's, and one is that of `storage` here. A view may have a third,
    # its base's, if the base is the engine's own: the gradient of a linear layer's weight is made
    # transposed, for instance.
    known = 3 if is_view else 2
    return (
        storage.nbytes() == gradient.nbytes
        and storage_uses(storage) <= known
        and uses == (_USES_OF_NEW_VIEW if is_view else _USES_OF_NEW)
    )


def _uses(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns how often a tensor and its base are referred to in C++ and in Python.

    A hook may keep it, or a user's function may have returned one of its own tensors.
    """
    base = base_of(tensor)
    uses = (tensor_uses(tensor), sys.getrefcount(tensor))
    return uses if base is None else (*uses, tensor_uses(base), sys.getrefcount(base))


def _uses_of_new(is_view: bool) -> tuple[int, ...]:
    tensor = torch.empty(2).view(2) if is_view else torch.empty(2)
    return _uses(tensor)


_USES_OF_NEW = _uses_of_new(False)
_USES_OF_NEW_VIEW = _uses_of_new(True)

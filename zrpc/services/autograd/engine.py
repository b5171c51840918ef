"""One worker's part of a backward pass: a single run of torch's engine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from zrpc.services.autograd.accumulation import Accumulation, must_run
from zrpc.services.autograd.nodes import NO_GRADIENT
from zrpc.services.autograd.state import ContextState

__all__ = ["check_roots", "run"]

# torch.autograd.backward without the Python around it, which takes half the time of a short run.
_run_backward: Any = torch.autograd.Variable._execution_engine.run_backward
_storage_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


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
    token: torch.Tensor,
    retain_graph: bool,
    state: ContextState,
    leaves: int = 0,
) -> None:
    """Runs the graph of the roots, each with a gradient of one, and of ``token`` once.

    ``token`` is ``state.start`` if nothing that was sent leads to the roots of the pass, and
    ``leaves`` are the AccumulateGrad nodes that it leads to, as a set of the context's tracer. The
    gradients of the leaves are added to those of the context.
    """
    start = state.start
    if token is start and not roots:
        return
    for root in roots:
        leaves |= state.tracer.reach(root).leaves
    state.tracer.forget()
    accumulators = state.tracer.leaves(leaves)
    variables = [node.variable for node in accumulators]
    # The nodes of the graph, not the leaves: a leaf has another node if its dtype was changed since
    # then, and is refused if it was frozen.
    edges = [GradientEdge(node, 0) for node in accumulators]
    # With the start among the inputs the engine also runs the parts that lead to no leaf: the
    # gradients of each tensor that was received must be sent.
    execute = partial(_execute, [] if token is start else [token], retain_graph, (*edges, start))
    if must_run(variables):
        with Accumulation(state, accumulators) as accumulation:
            begins = [accumulation.begin_at(root) for root in roots]
            if not roots:  # a root's node comes first: see `append_turn`
                accumulation.begin_with(token)
            execute(begins, accumulate=True)
        _add(state, accumulation.taken)
    else:
        # In one statement, so that nothing else refers to the gradients.
        _add(state, list(zip(variables, execute(roots, accumulate=False), strict=False)))


def _execute(
    tokens: Sequence[torch.Tensor],
    retain_graph: bool,
    inputs: tuple[torch.Tensor | GradientEdge, ...],
    roots: Sequence[torch.Tensor],
    accumulate: bool,
) -> Sequence[torch.Tensor | None]:
    """Runs torch's engine; returns the gradients of the inputs, unless it accumulates them."""
    gradients: Sequence[torch.Tensor | None] = _run_backward(
        (*roots, *tokens),
        (*map(torch.ones_like, roots), *(NO_GRADIENT for _ in tokens)),
        retain_graph,
        False,  # create_graph
        inputs,
        allow_unreachable=True,
        accumulate_grad=accumulate,
    )
    return gradients


def _add(state: ContextState, found: list[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    """Adds the gradients of leaves to those of the context; takes them out of the list."""
    # As in torch, gradients of which there are copies live until all are added. So no copy has the
    # memory in which a hook has seen a gradient.
    shared = []
    while found:
        leaf, gradient = found.pop()
        if gradient is None or not leaf.requires_grad:  # as in torch's AccumulateGrad
            continue
        uses = _uses(gradient)  # in a statement of its own, which adds no reference to it
        if _is_unshared(gradient, uses):
            state.add_gradient(leaf, gradient.detach())
        else:
            state.add_gradient(leaf, gradient.clone())
            shared.append(gradient)


def _is_unshared(gradient: torch.Tensor, uses: tuple[int, ...]) -> bool:
    """Returns whether nothing else uses a gradient's memory, so that it may be changed in place.

    torch's AccumulateGrad also takes over such a gradient, and copies others. ``uses`` are the
    gradient's `_uses` when it was found.
    """
    if gradient.layout is not torch.strided or _storage_use_count is None:
        return False
    storage = gradient.untyped_storage()
    is_view = gradient._base is not None
    # One reference is the gradient's, and one is that of `storage` here. A view may have a third,
    # its base's, if the base is the engine's own: the gradient of a linear layer's weight is made
    # transposed, for instance.
    known = 3 if is_view else 2
    return (
        storage.nbytes() == gradient.nbytes
        and _storage_use_count(storage._cdata) <= known
        and uses == (_USES_OF_NEW_VIEW if is_view else _USES_OF_NEW)
    )


def _uses(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns how often a tensor and its base are referred to in C++ and in Python.

    A hook may keep it, or a user's function may have returned one of its own tensors.
    """
    base: Any = tensor._base
    uses = (_use_count(tensor), sys.getrefcount(tensor))
    return uses if base is None else (*uses, _use_count(base), sys.getrefcount(base))


def _uses_of_new(is_view: bool) -> tuple[int, ...]:
    tensor = torch.empty(2).view(2) if is_view else torch.empty(2)
    return _uses(tensor)


_use_count: Callable[[torch.Tensor], int] = getattr(torch.Tensor, "_use_count", lambda _: 0)
_USES_OF_NEW = _uses_of_new(False)
_USES_OF_NEW_VIEW = _uses_of_new(True)

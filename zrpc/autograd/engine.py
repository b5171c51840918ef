"""One worker's part of a backward pass: a single run of torch's engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from zrpc.autograd.replicas import is_reduced

__all__ = ["check_roots", "run"]

# A run that goes through AccumulateGrad nodes writes to `.grad`; one at a time may.
_grad_lock = threading.Lock()


def check_roots(roots: Sequence[torch.Tensor]) -> None:
    """Raises the errors of torch for roots that can't be gone backward from.

    Raises:
        RuntimeError: there are none; one requires no grad, is no scalar, or is a leaf.
        TypeError: ``roots`` is no list of tensors.
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
    start: torch.Tensor,
    token: torch.Tensor,
    retain_graph: bool,
    accumulate: Callable[[torch.Tensor, torch.Tensor], None],
) -> None:
    """Runs the graph of the roots and of the chain once.

    Args:
        roots: where the pass begins, with gradients of one.
        start: the first token of the chain.
        token: the last one; the same where nothing was sent or received.
        retain_graph: whether the graph is to be kept for another pass.
        accumulate: called with each leaf that has a gradient.
    """
    outputs = list(roots)
    seeds = [torch.ones_like(root) for root in roots]
    if token is not start:
        outputs.append(token)
        seeds.append(torch.empty(0))
    if not outputs:
        return
    accumulators = [node for node in _accumulators(outputs) if node.variable is not start]
    leaves = [node.variable for node in accumulators]
    # With the first token among the inputs the engine runs the whole chain, also those parts
    # that lead to no leaf: each received message is to be answered.
    inputs = [*leaves, start] if token is not start else leaves
    if any(_has_hooks(node) for node in accumulators):
        _run_into_grad(outputs, seeds, inputs, leaves, retain_graph, accumulate)
        return
    gradients = torch.autograd.grad(
        outputs, inputs, seeds, retain_graph=retain_graph, allow_unused=True
    )
    for leaf, gradient in zip(leaves, gradients, strict=False):
        if gradient is not None:
            accumulate(leaf, gradient)


def _run_into_grad(
    outputs: list[torch.Tensor],
    seeds: list[torch.Tensor],
    inputs: list[torch.Tensor],
    leaves: list[torch.Tensor],
    retain_graph: bool,
    accumulate: Callable[[torch.Tensor, torch.Tensor], None],
) -> None:
    """As `run`, through the AccumulateGrad nodes, where hooks and DDP's reducer hang.

    They write to ``.grad``, which is put back afterwards.
    """
    with _grad_lock:
        before = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        try:
            torch.autograd.backward(outputs, seeds, retain_graph=retain_graph, inputs=inputs)
            gradients = [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]
        finally:
            for leaf, gradient in zip(leaves, before, strict=True):
                leaf.grad = gradient
    for leaf, gradient in zip(leaves, gradients, strict=True):
        if gradient is not None:
            accumulate(leaf, gradient)


def _has_hooks(accumulator: Any) -> bool:
    """Whether hooks hang on an AccumulateGrad node or on its leaf, to be called by way of it."""
    leaf = accumulator.variable
    if getattr(leaf, "_post_accumulate_grad_hooks", None) or is_reduced(leaf):
        return True
    # A node does not tell its hooks, but a new one joins the dictionary of those there are.
    for register in (accumulator.register_hook, accumulator.register_prehook):
        handle = register(_nothing)
        found = len(handle.hooks_dict_ref()) > 1
        handle.remove()
        if found:
            return True
    return False


def _nothing(*_: Any) -> None:
    """Hangs on a node for a moment, see `_has_hooks`."""


def _accumulators(outputs: Iterable[torch.Tensor]) -> list[Any]:
    """The AccumulateGrad nodes of all leaves that the graph of ``outputs`` reaches."""
    accumulators: list[Any] = []
    nodes: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            accumulators.append(node)
            continue
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return accumulators

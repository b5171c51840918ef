"""Tensors of one message that are views of each other, and stay views on arrival.

If a handler changes one of them in place, the others have the gradients of that change, too. All
tensors of a message that share memory also share their version counter. So torch notices if a value
that a backward pass needs was changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch._C._autograd import CreationMeta, _get_creation_meta, _set_creation_meta

from zrpc.wire.memory import begin_of, end_of


class Relation(NamedTuple):
    """A tensor of a message is a view of another one.

    Attributes:
        view: the index of the view.
        base: the index of the tensor that it is a view of.
        changeable: whether torch lets a program change it in place; not so for a view that a
            custom Function has returned.
    """

    view: int
    base: int
    changeable: bool


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns what a tensor is a view of, or the tensor itself; None if it stays no view."""
    base = tensor if tensor._base is None else tensor._base
    if type(base) is not torch.Tensor and type(base) is not torch.nn.Parameter:
        return None
    if base.layout is not torch.strided or base.is_quantized or base.is_conj() or base.is_neg():
        return None
    real = base.dtype.is_complex and tensor.dtype is base.dtype.to_real()
    if tensor.dtype is not base.dtype and not real:
        return None  # views of another dtype are not differentiable
    return base if base.requires_grad or not tensor.requires_grad else None


def span_of(base: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the part of ``base`` that holds these views of it."""
    size = base.element_size()
    first = min(map(begin_of, tensors)) // size
    end = -(-max(map(end_of, tensors)) // size)
    return base.as_strided((end - first,), (1,), first)


def is_changeable(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is no view that a custom Function has returned."""
    return not tensor._is_view() or _get_creation_meta(tensor) != CreationMeta.IN_CUSTOM_FUNCTION


def relate(tensors: list[torch.Tensor], relations: Sequence[Relation]) -> None:
    """Makes the received tensors views of each other, as they were where they came from.

    Call it when the tensors of a graph are part of it. Others that require grad stay leaves.
    """
    for index, base, changeable in relations:
        tensors[index] = _view(tensors[base], tensors[index], changeable)


def _view(base: torch.Tensor, tensor: torch.Tensor, changeable: bool) -> torch.Tensor:
    if not tensor.requires_grad:
        with torch.set_grad_enabled(not base.requires_grad):
            return _restored(base, tensor)
    if tensor.is_leaf or base.is_leaf:
        return tensor
    view: torch.Tensor = _View.apply(tensor, [base])
    if changeable:
        _set_creation_meta(view, CreationMeta.DEFAULT)
    return view


def _restored(base: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Returns the view of ``base`` with the memory of ``tensor``."""
    if base.dtype is not tensor.dtype:
        base = torch.view_as_real(base)
    view = base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    if tensor.is_neg():
        view = torch._neg_view(view)
    return view.conj() if tensor.is_conj() else view


class _View(torch.autograd.Function):
    """``(received, [base]) -> view``: the gradient of the view is that of ``received``.

    After a change in place it goes to the base instead, as torch does it. For that, the view must
    be the only output of its node.
    """

    @staticmethod
    def forward(ctx: Any, received: torch.Tensor, bases: list[torch.Tensor]) -> torch.Tensor:
        """Returns the view."""
        ctx.materialize_grads = False
        return _restored(bases[0], received)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Passes the gradient on."""
        return gradient, None

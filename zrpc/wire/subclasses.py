"""Tensors of other classes than torch's own, in messages that are part of an autograd graph.

Pickle would send them without their place in the graph. So a subclass whose elements are those of a
plain tensor is sent as that tensor and its attributes, and a jagged nested tensor as its values.
All others are refused if they require grad.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch._tensor import _rebuild_from_type_v2
from torch._utils import _get_obj_state
from torch.nested._internal.nested_tensor import NestedTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._pytree import tree_leaves

from zrpc.errors import SerializationError
from zrpc.wire.reducers import packing

_CLASSES = (torch.Tensor, torch.nn.Parameter)


def reduce_in_graph(value: Any) -> Any:
    """Reduces a tensor of a subclass that requires grad; NotImplemented for any other value.

    In a part of several messages, no tensor that requires grad is packed: each message is in the
    graph by itself.

    Raises:
        SerializationError: its gradient would be lost.
    """
    cls = type(value)
    if not issubclass(cls, torch.Tensor) or not value.requires_grad:
        return NotImplemented
    if packing.encoder.holes is not None:
        return packing.encoder.holes.leave_out(value)
    if cls in _CLASSES:
        return NotImplemented
    if cls is UninitializedParameter or cls is UninitializedBuffer:
        return NotImplemented  # has no elements yet, and so no gradient
    if isinstance(value, NestedTensor):
        values = (value.values(), value.offsets(), value.lengths(), value._ragged_idx)
        return torch.nested.nested_tensor_from_jagged, values
    if cls.__reduce_ex__ not in (torch.Tensor.__reduce_ex__, torch.nn.Parameter.__reduce_ex__):
        reduced = cls.__reduce_ex__(value, pickle.HIGHEST_PROTOCOL)
        if any(
            isinstance(each, torch.Tensor) and each.requires_grad for each in tree_leaves(reduced)
        ):
            return reduced  # the parts that it is made from are in the graph
    elif cls.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        with torch._C.DisableTorchFunctionSubclass():
            plain = value.as_subclass(torch.Tensor)
        state = _get_obj_state(value)
        if issubclass(cls, torch.nn.Parameter):  # a parameter arrives as a tensor of the graph
            cls = torch.Tensor
        return _rebuild_from_type_v2, (_unchanged, cls, (plain,), state)
    raise SerializationError(
        f"expected tensors whose gradients can be sent, found a {cls.__qualname__} that requires "
        "grad, in an autograd context: send the tensors that it consists of, or its detach()"
    )


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def check_sendable(value: Any) -> None:
    """Checks a value that could not be pickled.

    Raises:
        SerializationError: it is a tensor that can't be sent; says what to send instead.
    """
    if not isinstance(value, torch.Tensor):
        return
    found = None
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        found = "one inside of a transform of torch.func (such as vmap or grad): call outside of it"
    elif value.is_mkldnn:
        found = "one of layout torch._mkldnn: send tensor.to_dense()"
    elif type(value).__name__ in ("FakeTensor", "FunctionalTensor"):
        found = (
            f"a {type(value).__name__}, which has a shape only, as in torch.export: call outside "
            "of its mode"
        )
    if found is not None:
        raise SerializationError(f"expected tensors with elements in memory, found {found}")

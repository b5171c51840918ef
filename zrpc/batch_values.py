"""The arguments of the calls of a batch, put together; and its result, taken apart."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from zrpc.errors import RpcError

# The arguments and the keyword arguments of one call.
Call = tuple[tuple[Any, ...], dict[str, Any]]


def columns(calls: Sequence[Call], stack: bool, receiver: tuple[Any, ...] = ()) -> Call:
    """Returns the arguments of a batch: for each argument, the values of all calls.

    Args:
        calls: of the same form, see `form_of`.
        stack: whether tensors are stacked; otherwise each argument becomes a list.
        receiver: the object of a method, which comes first; else empty.

    Raises:
        RpcError: the calls have no arguments, so the function could not know their number.
    """
    args, kwargs = calls[0]
    if not args and not kwargs:
        raise RpcError(
            "expected a call with an argument, found none: a batched function learns the number of "
            "calls from the lists of their arguments"
        )
    if stack:
        args, kwargs = _stacked(calls)
    else:
        args = tuple(list(values) for values in zip(*(each for each, _ in calls), strict=True))
        kwargs = {name: [each[name] for _, each in calls] for name in kwargs}
    return (*receiver, *args), kwargs


def form_of(call: Call, stack: bool) -> Hashable:
    """Returns what is equal for calls that may be in one batch."""
    args, kwargs = call
    if not stack:
        return len(args), frozenset(kwargs)
    leaves, structure = tree_flatten((args, dict(sorted(kwargs.items()))))
    kinds = [
        (each.shape, each.dtype, each.device, each.layout)
        if isinstance(each, torch.Tensor)
        else None
        for each in leaves
    ]
    return repr(structure), tuple(kinds)


def rows(result: Any, count: int, stack: bool, name: str) -> list[Any]:
    """Returns the results of the single calls; one that is an exception must be raised.

    Args:
        result: what the function has returned for the batch.
        count: the number of calls.
        stack: whether tensors are taken apart.
        name: of the function, for errors.

    Raises:
        RpcError: the result does not have ``count`` parts.
    """
    if stack and not _has_exception(result):
        return _taken_apart(result, count, name)
    if not isinstance(result, (list, tuple)):
        hint = "; stack=True takes tensors apart" if isinstance(result, torch.Tensor) else ""
        raise RpcError(
            f"expected a list of {count} results of the batched function {name}, one for each "
            f"call, found {_described(result)}{hint}"
        )
    if len(result) != count:
        raise RpcError(
            f"expected a list of {count} results of the batched function {name}, one for each "
            f"call, found {len(result)}: return an exception in place of a result that is missing"
        )
    return list(result)


def _stacked(calls: Sequence[Call]) -> Call:
    first, structure = tree_flatten(calls[0])
    # By the order of the first call: the keyword arguments of others may be in another one.
    names = list(calls[0][1])
    others = [tree_leaves((args, {name: kwargs[name] for name in names})) for args, kwargs in calls]
    stacked = [
        torch.stack(list(values)) if isinstance(values[0], torch.Tensor) else list(values)
        for values in zip(*others, strict=True)
    ]
    assert len(stacked) == len(first)
    found: Call = tree_unflatten(stacked, structure)
    return found


def _taken_apart(result: Any, count: int, name: str) -> list[Any]:
    parts, structure = tree_flatten(result, is_leaf=_is_column)
    if all(each is None for each in parts):
        raise RpcError(
            f"expected tensors with a first dimension of {count} as the result of the batched "
            f"function {name}, found {_described(result)}"
        )
    takes = [_column(each, count, name) for each in parts]
    return [tree_unflatten([take(place) for take in takes], structure) for place in range(count)]


def _column(part: Any, count: int, name: str) -> Callable[[int], Any]:
    """Returns a function of a call's place, for a part of a result: a tensor, or a list."""
    if part is None:
        return lambda _: None
    if isinstance(part, torch.Tensor):
        size = part.shape[0] if part.dim() else 0
        what = f"a tensor of shape {tuple(part.shape)}"
    elif _is_column(part):
        size, what = len(part), f"a list of {len(part)}"
    else:
        size, what = -1, _described(part)
    if size != count:
        raise RpcError(
            f"expected a first dimension of {count} in each part of the result of the batched "
            f"function {name}, one row for each call, found {what}: with stack=True, return "
            "tensors and lists of that length, in tuples and dicts if you like; a list of tensors "
            "counts as a structure, too"
        )
    return part.__getitem__  # type: ignore[no-any-return]


def _is_column(part: Any) -> bool:
    """Returns whether a list has an item for each call: that is so if it has no tensors."""
    return type(part) is list and not any(isinstance(e, torch.Tensor) for e in tree_leaves(part))


def _has_exception(result: Any) -> bool:
    return type(result) is list and any(isinstance(each, BaseException) for each in result)


def _described(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"

"""Arguments whose value differs from member to member of a group. No I/O in here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterable, Sequence, Sized
from itertools import islice, pairwise
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from typing_extensions import override

from zrpc.errors import RpcError
from zrpc.wire.pickling import encoder, register_reducer

# Of these, one is as good as another, and as quickly packed as a reference to it.
_ATOMS = (bool, int, float, complex, str, bytes, type(None))


class PerMember(ABC):
    """An argument whose value each member gets for itself."""

    @abstractmethod
    def values(self, count: int) -> Sequence[Any]:
        """Returns the values, one for each of ``count`` members.

        Raises:
            ValueError: it has not that number of values.
            TypeError: the argument has no parts.
        """

    def repeated(self) -> set[int]:
        """Returns the identities of the values that several members get."""
        return set()


class Split(PerMember):
    """What `zrpc.split` returns."""

    def __init__(self, value: Any, dim: int) -> None:
        self._value = value
        self._dim = dim

    @override
    def values(self, count: int) -> Sequence[Any]:
        value = self._value
        if not count:
            raise ValueError("expected members to split a value among, found an empty group")
        whole = _is_leaf(value)
        leaves, structure = tree_flatten(value, is_leaf=_is_leaf)
        parts = [
            self._parts(leaf, count) if whole or _has_parts(leaf) else [leaf] * count
            for leaf in leaves
        ]
        # A structure without leaves, such as an empty dict, is the same for all.
        columns = zip(*parts, strict=True) if parts else [()] * count
        return [tree_unflatten(list(each), structure) for each in columns]

    def _parts(self, value: Any, count: int) -> Sequence[Any]:
        if isinstance(value, torch.Tensor) or getattr(value, "ndim", 1) == 0:
            if not -value.ndim <= self._dim < value.ndim:
                raise ValueError(
                    f"expected tensors with a dimension {self._dim} to split, found one of shape "
                    f"{tuple(value.shape)}: pass it without split() if all members need it"
                )
            try:
                return torch.tensor_split(value, count, self._dim)
            except RuntimeError as error:  # it is sparse, or nested
                raise TypeError(
                    f"expected a dense tensor to split, found one of layout {value.layout} that "
                    "torch can't split: split it yourself, and pass the parts by each()"
                ) from error
        if not _has_parts(value):
            raise TypeError(
                "expected a tensor, a sequence, or a structure of these to split, found one of "
                f"type {type(value).__name__}"
            )
        if self._dim:
            raise ValueError(
                f"expected a tensor to split along dimension {self._dim}, found one of type "
                f"{type(value).__name__}"
            )
        size, more = divmod(len(value), count)
        starts = [place * size + min(place, more) for place in range(count + 1)]
        if isinstance(value, deque):  # it has no slices
            return [deque(islice(value, *bounds)) for bounds in pairwise(starts)]
        return [value[start:end] for start, end in pairwise(starts)]


class Each(PerMember):
    """What `zrpc.each` returns."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._values = list(values)

    @override
    def values(self, count: int) -> Sequence[Any]:
        if len(self._values) != count:
            raise ValueError(
                f"expected each() of {count} values, one for each member of the group, found "
                f"{len(self._values)}"
            )
        return self._values

    @override
    def repeated(self) -> set[int]:
        times = Counter(id(value) for value in self._values if type(value) not in _ATOMS)
        return {each for each, number in times.items() if number > 1}


class Share:
    """What `zrpc.share` returns: each item is for one member, whichever is free."""

    def __init__(self, items: Iterable[Any]) -> None:
        self.items = list(items)


def _has_parts(value: Any) -> bool:
    """Whether a value is a tensor, or a sequence (or an array) that has slices."""
    if isinstance(value, str | bytes | bytearray | dict | PackedSequence):
        return False
    return isinstance(value, torch.Tensor | Sized) and hasattr(value, "__getitem__")


def _is_leaf(value: object) -> bool:
    """Whether a value in a structure is divided as a whole: a list, or a tuple without tensors."""
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return not any(isinstance(each, torch.Tensor | dict) for each in tree_leaves(value))
    leaves = tree_leaves(value, is_leaf=lambda each: each is not value)
    return isinstance(value, list | deque | PackedSequence) or (
        len(leaves) == 1 and leaves[0] is value
    )


def _reduce(argument: Any) -> Any:
    message = encoder()
    if message is None or message.holes is None:
        name = type(argument).__name__.lower()
        raise RpcError(
            f"expected a call of a group for an argument by {name}(), found one of a single worker "
            f"or object: pass the value itself, or make a group by zrpc.group()"
        )
    return message.holes.leave_out(argument)


for _kind in (Split, Each, Share):
    register_reducer(_kind, _reduce)

"""Whether anything but its RRef can change a value, so that a copy of it stays current."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch

__all__ = ["is_sole"]

# A value of up to this size, in bytes, is worth sending though nobody may ask for it.
_MAX_BYTES = 4096

_IMMUTABLE = frozenset((int, float, bool, complex))
_BYTES = frozenset((str, bytes))

_storage_count: Any = getattr(torch._C, "_storage_Use_Count", None)


class _Receiver:
    def value(self, value: object) -> int:
        return sys.getrefcount(value)


def _references_of_frames() -> int:
    """Counts the references to a value that an `Execution` hands to a sink, in the sink."""
    result = object()
    return _Receiver().value(result)


# Python's versions differ in the references that the frames of a call hold. From 3.14 on this is
# less than an `Execution` holds, so a tensor never counts as sole, and is fetched.
_FRAMES = _references_of_frames()


def is_sole(value: Any, references: int) -> bool:
    """Returns whether a small value can't change, or only by the hands that were given it.

    It looks no deeper than that: a list, say, never counts as sole.

    Args:
        value: the result of an execution, in its sink.
        references: what ``sys.getrefcount`` says in the sink's own frame.
    """
    kind = type(value)
    if kind in _IMMUTABLE:
        return True
    if kind in _BYTES:
        return len(value) <= _MAX_BYTES
    return kind is torch.Tensor and references <= _FRAMES and _is_sole_tensor(value)


def _is_sole_tensor(tensor: torch.Tensor) -> bool:
    if (
        _storage_count is None
        or not tensor.is_cpu
        or tensor.layout is not torch.strided
        or tensor.requires_grad
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.nbytes > _MAX_BYTES
        or tensor._use_count() != 1  # type: ignore[attr-defined]
        or weakref.getweakrefcount(tensor)
    ):
        return False
    storage = tensor.untyped_storage()
    counts = sys.getrefcount(storage), _storage_count(storage._cdata)
    # The memory of another library can't be resized: an array of numpy may share it.
    return counts == _STORAGE_COUNTS and storage.resizable() and not storage.is_shared()


def _counts_of_own_storage() -> tuple[int, int]:
    """Counts the references to a storage that one tensor has to itself, in Python and C++."""
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage), 0 if _storage_count is None else _storage_count(storage._cdata)


_STORAGE_COUNTS = _counts_of_own_storage()

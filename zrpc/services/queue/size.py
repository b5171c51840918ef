"""How large an item of a queue is, and what is in it."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType, TracebackType
from typing import Any

import torch

_PLAIN = frozenset((float, complex, bool, type(None), torch.dtype, torch.device, torch.Size))
_BYTES = (bytes, bytearray, str)
# What pickle sends by name, or not at all.
_WITHOUT_PARTS = (type, ModuleType, BuiltinFunctionType, CodeType, FrameType, TracebackType)
# What an object occupies beside its contents, in bytes, roughly.
_OBJECT_BYTES = 64


def measure(value: Any) -> tuple[int, bool]:
    """Returns the bytes of a value, and whether it needs gradients.

    The bytes are those of its tensors, arrays, strings and other parts, also in containers and in
    attributes of objects, each once. It needs gradients if a tensor in it was computed from others
    that do.
    """
    size, in_graph = 0, False
    # The parts, by identity; they are kept, so that no other object gets the same one.
    left, seen = [value], dict[int, Any]()
    # The bytes of tensors, by their storage: no more than it has.
    stored = dict[int, int]()
    while left:
        part = left.pop()
        size += _OBJECT_BYTES
        kind = type(part)
        if kind in _PLAIN:
            continue
        if kind is int:
            size += part.bit_length() >> 3
            continue
        if id(part) in seen:
            continue
        seen[id(part)] = part
        if isinstance(part, _BYTES):
            size += len(part)
        elif isinstance(part, torch.Tensor):
            storage, found, room = _stored(part)
            stored[storage] = min(stored.get(storage, 0) + found, room)
            in_graph |= part.grad_fn is not None
            left += vars(part).values()
        else:
            size += _bytes_of(part)
            left += _parts_of(part)
    return size + sum(stored.values()), in_graph


def _stored(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Returns which storage a tensor has, and the bytes of the tensor and of the storage."""
    size = tensor.numel() * tensor.element_size()
    try:
        storage = tensor.untyped_storage()
        return storage._cdata, size, storage.nbytes() or size
    except Exception:  # a sparse one has none; that of a subclass may raise anything
        return id(tensor), size, size


def _bytes_of(part: Any) -> int:
    """Returns the bytes of an array or another buffer; 0 for what is none."""
    found = _asked(part, "nbytes")
    if isinstance(part, torch.UntypedStorage):
        found = part.nbytes()
    elif type(found) is not int:
        try:
            found = memoryview(part).nbytes
        except Exception:  # of an object of any kind
            return 0
    return found


def _parts_of(part: Any) -> Iterable[Any]:
    """Returns what an object refers to, as far as pickle sends that with it."""
    if isinstance(part, _WITHOUT_PARTS):
        return ()
    if isinstance(part, FunctionType):
        return part.__closure__ or ()
    if _asked(_asked(part, "dtype"), "hasobject") is True:  # the array itself does not say
        found: list[Any] = part.ravel().tolist()
        return found
    reducers = type(part).__reduce__, type(part).__reduce_ex__
    if not isinstance(part, BaseException) and any(type(r) is FunctionType for r in reducers):
        # It determines what is sent. An RRef has no attributes, but refers to its agent.
        attributes = _asked(part, "__dict__")
        return attributes.values() if type(attributes) is dict else ()
    return gc.get_referents(part)


def _asked(part: Any, name: str) -> Any:
    """Returns an attribute of an object of any kind; None if it has none."""
    try:
        return getattr(part, name)
    except Exception:
        return None

"""How large an item of a queue is, and what is in it."""

from __future__ import annotations

from typing import Any

import torch

_PLAIN = (int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)
_BYTES = (bytes, bytearray, str)
# What an object occupies beside its contents, in bytes, roughly.
_OBJECT_BYTES = 64


def measure(value: Any) -> tuple[int, bool]:
    """Returns the bytes of a value, and whether it needs gradients.

    The bytes are those of its tensors, arrays, strings and other parts, also in containers and in
    attributes of objects. It needs gradients if a tensor in it was computed from others that do.
    """
    size, in_graph = 0, False
    left, seen = [value], set[int]()
    while left:
        part = left.pop()
        size += _OBJECT_BYTES
        kind = type(part)
        if kind in _PLAIN:
            continue
        if kind in _BYTES:
            size += len(part)
        elif isinstance(part, torch.Tensor):
            size += _bytes_of(part)
            in_graph |= part.grad_fn is not None
        elif id(part) not in seen:
            seen.add(id(part))
            if isinstance(part, dict):
                left += [*part.keys(), *part.values()]
            elif isinstance(part, (tuple, list, set, frozenset)):
                left += part
            else:
                size += _bytes_of(part)
                left += _attributes_of(part)
    return size, in_graph


def _bytes_of(part: Any) -> int:
    """Returns the bytes of a tensor or an array; 0 for what does not say."""
    found = 0
    try:
        found = part.nbytes
    except Exception:  # of an object of any kind; a sparse tensor has none, either
        if isinstance(part, torch.Tensor):
            found = part.numel() * part.element_size()
    return found if type(found) is int else 0


def _attributes_of(part: Any) -> list[Any]:
    attributes = getattr(part, "__dict__", None)
    return list(attributes.values()) if type(attributes) is dict else []

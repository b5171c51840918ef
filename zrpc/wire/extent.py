"""Which bytes of its storage a tensor covers, and memory as a buffer.

Bytes are counted from the beginning of the storage, not by address: the address of memory on a
device may mean nothing to this process.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch


def extent_of(tensor: torch.Tensor) -> int:
    """Returns the number of elements from the tensor's first to its last in memory, inclusive."""
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def begin_of(tensor: torch.Tensor) -> int:
    """Returns which byte of its storage a tensor begins with."""
    return int(tensor.storage_offset()) * tensor.element_size()


def end_of(tensor: torch.Tensor) -> int:
    """Returns which byte of its storage follows the tensor's last element."""
    return begin_of(tensor) + extent_of(tensor) * tensor.element_size()


def window(start: int, size: int, owner: Any) -> ctypes.Array[ctypes.c_char]:
    """Returns memory as a buffer, which keeps the memory's owner alive."""
    window = (ctypes.c_char * size).from_address(start)
    window.owner = owner  # type: ignore[attr-defined]
    return window

"""The memory of values: what a tensor covers of its storage, and aligned addresses.

Bytes of a storage are counted from its beginning, not by address: the address of memory on a device
may mean nothing to this process. torch and numpy rely on aligned addresses for some dtypes.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from zrpc.runtime.allocator import uninitialized

# In bytes, what the largest element (complex128) needs: the code that compilers generate for its
# copies crashes the process at any other address. malloc aligns to this as well.
ALIGNMENT = 16


def address_of(buffer: Any) -> int:
    """Returns the address of a writable buffer that is not empty."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def aligned(buffer: Any) -> memoryview:
    """Returns the bytes of a received buffer, copied if they are not aligned.

    ZeroMQ's frames begin 8 bytes after an aligned address.

    Args:
        buffer: a writable or empty buffer. The view keeps it alive.

    Raises:
        MemoryError: there is no memory left for a copy.
    """
    view = memoryview(buffer).cast("B")
    if not view.nbytes:
        return view
    start = address_of(view)
    if start % ALIGNMENT == 0:
        return view
    copy = uninitialized(view.nbytes)
    # Unlike a copy by Python, this releases the interpreter's lock, so other threads may run.
    ctypes.memmove(address_of(copy), start, view.nbytes)
    return memoryview(copy)


def extent_of(tensor: torch.Tensor) -> int:
    """Returns the number of elements from the tensor's first to its last in memory, inclusive.

    For a tensor with elements.
    """
    if tensor.is_contiguous():
        return tensor.numel()
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def begin_of(tensor: torch.Tensor) -> int:
    """Returns which byte of its storage a tensor begins with."""
    return int(tensor.storage_offset()) * tensor.element_size()


def end_of(tensor: torch.Tensor) -> int:
    """Returns which byte of its storage follows the tensor's last element."""
    return (int(tensor.storage_offset()) + extent_of(tensor)) * tensor.element_size()


def window(start: int, size: int, owner: Any) -> ctypes.Array[ctypes.c_char]:
    """Returns memory as a buffer, which keeps the memory's owner alive."""
    window = (ctypes.c_char * size).from_address(start)
    window.owner = owner  # type: ignore[attr-defined]
    return window

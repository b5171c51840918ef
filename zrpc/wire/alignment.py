"""Aligns the memory of large values, which torch and numpy rely on for some dtypes."""

from __future__ import annotations

import ctypes
from typing import Any

from zrpc.runtime.allocator import uninitialized

# In bytes, what the largest element (complex128) needs: the code that compilers generate for its
# copies crashes the process at any other address. malloc aligns to this as well.
ALIGNMENT = 16


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
    start = ctypes.addressof(ctypes.c_char.from_buffer(view))
    if start % ALIGNMENT == 0:
        return view
    copy = uninitialized(view.nbytes)
    # Unlike a copy by Python, this releases the interpreter's lock, so other threads may run.
    ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(copy)), start, view.nbytes)
    return memoryview(copy)

"""Where the memory of large values begins: torch, and numpy, rely on that for some dtypes."""

from __future__ import annotations

import ctypes
from typing import Any

from zrpc.malloc import uninitialized

__all__ = ["ALIGNMENT", "aligned"]

# What the largest element (complex128) needs: code that the compiler has made for its copies ends
# the process where it finds another address. It is what malloc gives.
ALIGNMENT = 16


def aligned(buffer: Any) -> memoryview:
    """The bytes of a buffer that has come, copied where they don't begin as they should.

    ZeroMQ's frames begin 8 bytes after such an address.

    Args:
        buffer: one that can be written to, or an empty one. The view keeps it.

    Raises:
        MemoryError: there is none for a copy.
    """
    view = memoryview(buffer).cast("B")
    if not view.nbytes:
        return view
    start = ctypes.addressof(ctypes.c_char.from_buffer(view))
    if start % ALIGNMENT == 0:
        return view
    copy = uninitialized(view.nbytes)
    # Other threads may run meanwhile, as they could not while Python copies.
    ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(copy)), start, view.nbytes)
    return memoryview(copy)

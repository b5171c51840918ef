"""Measures the memory of this process, and how much of it is in use."""

from __future__ import annotations

import contextlib
import ctypes

from zrpc.bench.machine import read_kib

__all__ = ["in_use", "resident"]


class _Mallinfo(ctypes.Structure):
    """The result of glibc's ``mallinfo2``: sums over all arenas."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def in_use() -> int:
    """Returns the bytes that malloc has given out; 0 if the C library can't report them."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return 0
    mallinfo2.restype = _Mallinfo
    info = mallinfo2()
    total: int = info.uordblks + info.hblkhd
    return total


def resident() -> int:
    """Returns the resident bytes of this process alone, after malloc has freed what it can."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    return read_kib("/proc/self/status", "RssAnon")

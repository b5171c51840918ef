"""Keeps the C++ logs of torch's stores from the users' terminal.

A TCPStore that loses its host logs a warning with a stack of thirty C++ frames, beside the error
that it raises. One that can't connect logs such an error. Either is handled, or reported in words
of our own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from zrpc.runtime.interrupts import UninterruptedLock

__all__ = ["without_warnings"]

_ERROR, _FATAL = 2, 3  # torch's levels: 0 is INFO, 1 is WARNING

# Guards the number below and the changes of torch's level.
_lock = UninterruptedLock()
_users = 0
_before = 0


def _find_level() -> ctypes.c_int | None:
    """Returns torch's own level; None if the user has set one, or this torch keeps it elsewhere."""
    if "TORCH_CPP_LOG_LEVEL" in os.environ:
        return None
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        return ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None


_level = _find_level()


@contextlib.contextmanager
def without_warnings(errors: bool = False) -> Iterator[None]:
    """Hides C++ warnings of this process during a block, unless ``TORCH_CPP_LOG_LEVEL`` is set.

    Any thread may enter it; the last one that leaves shows warnings again.

    Args:
        errors: hides C++ errors too.
    """
    if _level is None:
        yield
        return
    global _users, _before
    with _lock:
        if not _users:
            _before = _level.value
        _level.value = max(_level.value, _FATAL if errors else _ERROR)
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _level.value = _before

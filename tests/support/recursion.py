"""Calls near the limit of recursion."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

__all__ = ["call_with_frames_left"]


def call_with_frames_left(left: int, act: Callable[[], object]) -> bool:
    """Calls ``act()`` in a thread whose stack has room for ``left`` more frames.

    Returns:
        Whether there was no RecursionError.
    """
    depth, frame = 0, sys._getframe()
    while frame.f_back is not None:
        depth, frame = depth + 1, frame.f_back
    gc.disable()  # what it calls there would find no room, and Python reports that
    try:
        _descend(sys.getrecursionlimit() - depth - left, act)
    except RecursionError:
        return False
    finally:
        gc.enable()
    return True


def _descend(depth: int, act: Callable[[], object]) -> None:
    if depth > 0:
        _descend(depth - 1, act)
    else:
        act()

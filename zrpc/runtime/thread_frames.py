"""What each thread of this process runs at the moment."""

from __future__ import annotations

import gc
import os
import sys
import threading
from types import FrameType

from zrpc.runtime.forks import free_in_child

# Held while collections are off, so that one thread turns them on again for another one's look. A
# thread may take it twice, as a signal handler may interrupt it.
_lock = free_in_child(threading.RLock())
_off = False  # whether collections are off for a look, and are turned on again after it


def thread_frames() -> dict[int, FrameType]:
    """Returns the frame of each thread, by its ident, as ``sys._current_frames`` does.

    No garbage is collected meanwhile. Before Python 3.11.5, a collection there may run a finalizer,
    and so let other threads go on, while a lock of the interpreter is held. If one of them starts a
    thread, the process stands still without limit. See CPython's issue 106883.

    Example:
        >>> threading.get_ident() in thread_frames()
        True
    """
    global _off
    with _lock:
        enabled = gc.isenabled()
        _off = _off or enabled
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if enabled:
                _turn_on()


def _turn_on() -> None:
    """Turns collections on after a look; in a forked child, whose parent may have been at one."""
    global _off
    if _off:
        gc.enable()
        _off = False


os.register_at_fork(after_in_child=_turn_on)

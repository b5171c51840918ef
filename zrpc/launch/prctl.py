"""Linux's prctl: how the death of one process reaches its relatives."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, argument: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {argument}): {os.strerror(number)}")


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that forked it ends.

    Args:
        parent: The parent's process id. If that parent is gone already, the signal that would
            tell of its death has been missed, and this process ends here.
    """
    if sys.platform != "linux":
        return
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies, in place of init."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)

"""Standard input, output and error where whoever started this process has closed them."""

from __future__ import annotations

import os
import subprocess
import sys

__all__ = ["is_open", "open_standard_descriptors", "output_of_child"]


def is_open(fd: int) -> bool:
    """Whether this process has anything open under this number."""
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def output_of_child(number: int, given: int | None = None) -> int | None:
    """What ``subprocess`` is to give a new process as its descriptor 1 or 2.

    This process's own where none is given; but not what has got the number of a standard stream
    that was closed, and isn't passed on: then the null device.
    """
    passed_on = is_open(number) and (sys.platform == "win32" or os.get_inheritable(number))
    return subprocess.DEVNULL if given is None and not passed_on else given


def open_standard_descriptors() -> None:
    """Opens the null device for those of descriptors 0 to 2 that are closed.

    Otherwise the next pipe or socket gets such a number, and what is printed goes into it. To be
    called before this process opens anything else.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if is_open(fd):
            continue
        opened = os.open(os.devnull, os.O_WRONLY if fd else os.O_RDONLY)
        if opened != fd:  # another thread may have opened something meanwhile
            os.close(opened)
            continue
        os.set_inheritable(fd, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, "w" if fd else "r", closefd=False))  # noqa: SIM115

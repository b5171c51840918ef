"""Descriptors of this process: those that were closed when it started, and others to be moved."""

from __future__ import annotations

import fcntl
import os
import select
import subprocess
import sys
from collections.abc import Sequence


def is_open(fd: int) -> bool:
    """Returns whether this process has anything open under this number."""
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def output_of_child(fd: int, given: int | None = None) -> int | None:
    """Returns what ``subprocess`` should give a new process as its descriptor 1 or 2.

    Without a given descriptor, that is this process's own, unless its standard stream was closed.
    A file opened later may then have the number, but isn't inherited: use the null device instead.
    """
    inherited = is_open(fd) and os.get_inheritable(fd)
    return subprocess.DEVNULL if given is None and not inherited else given


def open_standard_descriptors() -> None:
    """Opens the null device for each of the descriptors 0 to 2 that is closed.

    Otherwise the next pipe or socket gets such a number, and printed output goes into it. Must be
    called before this process opens anything else.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if is_open(fd):
            continue
        opened = os.open(os.devnull, os.O_WRONLY if fd else os.O_RDONLY)
        if opened != fd:  # another thread has opened something meanwhile
            os.close(opened)
            continue
        os.set_inheritable(fd, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, "w" if fd else "r", closefd=False))  # noqa: SIM115


def move_descriptors(fds: Sequence[int], targets: Sequence[int]) -> None:
    """Moves each descriptor to its target number, even if the two lists overlap."""
    lifted = []
    for fd in fds:
        lifted.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(targets) + 1))
        os.close(fd)
    for fd, target in zip(lifted, targets, strict=True):
        os.dup2(fd, target, inheritable=target < 3)
        os.close(fd)


def readable(*fds: int, timeout: float | None = None) -> set[int]:
    """Waits until one of some descriptors can be read; returns those, none after the timeout."""
    return _ready(select.POLLIN, fds, timeout)


def writable(*fds: int, timeout: float | None = None) -> set[int]:
    """Waits until one of some descriptors can be written; returns those, none after the timeout."""
    return _ready(select.POLLOUT, fds, timeout)


def _ready(event: int, fds: Sequence[int], timeout: float | None) -> set[int]:
    # A launch of many workers has more descriptors than `select.select` takes.
    poll = select.poll()
    for fd in fds:
        poll.register(fd, event)
    return {fd for fd, _ in poll.poll(None if timeout is None else timeout * 1000)}

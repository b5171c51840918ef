"""File descriptors in reserve for when a process has no others left.

libzmq (4.3.5) aborts the process if it accepts a connection at a Unix socket and has no descriptor
for it. So some descriptors are kept open, and closed as soon as there are no others: for the peers
that connect then, and for the mailboxes that answer them. If these are used up as well, the socket
is hidden until there are others; see `Network.look_after_descriptors`.
"""

from __future__ import annotations

import os

from zrpc.runtime.forks import free_in_child
from zrpc.runtime.interrupts import UninterruptedLock

# Each peer that connects, and each new mailbox, takes two or three descriptors.
_RESERVED_DESCRIPTORS = 16


class DescriptorReserve:
    """A reserve that several agents share. All methods may be called from any thread.

    Args:
        size: the number of descriptors.
    """

    def __init__(self, size: int = _RESERVED_DESCRIPTORS) -> None:
        self._size = size
        # Guards everything below.
        self._lock = free_in_child(UninterruptedLock())
        self._users = 0
        self._kept: list[int] = []

    def add_user(self) -> None:
        """Registers one more agent; must be followed by one `remove_user`."""
        with self._lock:
            self._users += 1
            self._fill()

    def remove_user(self) -> None:
        """Unregisters an agent; the last one closes the reserve."""
        with self._lock:
            self._users -= 1
            if not self._users:
                self._empty()

    def refresh(self) -> bool:
        """Fills the reserve if possible, and releases it if no other descriptors are left.

        Must be called some times a second. It takes some microseconds.

        Returns:
            Whether there are descriptors left.
        """
        with self._lock:
            self._fill()
            try:
                os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
                return True
            except OSError:
                return self._empty()

    @property
    def released(self) -> bool:
        """Whether the reserve is empty."""
        return not self._kept

    def release(self) -> bool:
        """Closes the reserved descriptors; returns False if there were none."""
        with self._lock:
            return self._empty()

    def _fill(self) -> None:
        """Fills an empty reserve if twice as many are left; the lock is held."""
        if self._kept or not self._users:
            return
        taken: list[int] = []
        try:
            taken.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            while len(taken) < 2 * self._size:
                taken.append(os.dup(taken[0]))
            self._kept = taken[: self._size]
        except OSError:
            pass
        for fd in taken[len(self._kept) :]:
            os.close(fd)

    def _empty(self) -> bool:
        """Closes the reserved descriptors; returns False if there were none; the lock is held."""
        was_filled = bool(self._kept)
        while self._kept:
            os.close(self._kept.pop())
        return was_filled


# The one of this process.
reserve = DescriptorReserve()

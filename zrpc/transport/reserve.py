"""File descriptors that are kept for when a process has no others left.

libzmq (4.3.5) aborts the process where it accepts a connection at a Unix socket and has no
descriptor for it. So some are kept open, and given up as soon as it is seen that there are no
others: for the peers that connect then, and for the mailboxes that answer them. Where these are
used up as well, nobody is to find the socket until there are others; see
`Network.look_after_descriptors`.
"""

from __future__ import annotations

import os
import threading

__all__ = ["DescriptorReserve", "reserve"]

# Each peer that connects, and each that is first sent to, takes two or three.
_SIZE = 16


class DescriptorReserve:
    """A reserve that several agents share. All methods may be called from any thread.

    Args:
        size: how many descriptors.
    """

    def __init__(self, size: int = _SIZE) -> None:
        self._size = size
        # Guards the rest.
        self._lock = threading.Lock()
        self._users = 0
        self._kept: list[int] = []

    def join(self) -> None:
        """An agent begins to use it; to be followed by one `leave`."""
        with self._lock:
            self._users += 1
            self._fill()

    def leave(self) -> None:
        """An agent ends."""
        with self._lock:
            self._users -= 1
            if not self._users:
                self._empty()

    def look(self) -> bool:
        """Takes the reserve where it can be had, and gives it up where there is nothing else.

        To be called some times a second: it costs about two microseconds.

        Returns:
            Whether there are descriptors left.
        """
        with self._lock:
            if not self._kept:
                self._fill()
            if self._kept:
                try:
                    os.close(os.dup(self._kept[0]))
                except OSError:
                    self._empty()
                return True
            try:
                os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            except OSError:
                return False
            return True

    @property
    def given_up(self) -> bool:
        """Whether there is none just now."""
        return not self._kept

    def release(self) -> bool:
        """Gives up the reserve; False where there was none."""
        with self._lock:
            had = bool(self._kept)
            self._empty()
            return had

    def _fill(self) -> None:
        """Takes the reserve, where as many again are left; the lock is held."""
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

    def _empty(self) -> None:
        while self._kept:
            os.close(self._kept.pop())


# That of this process.
reserve = DescriptorReserve()

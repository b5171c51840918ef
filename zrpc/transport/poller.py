"""Waits for several descriptors at once, in one thread, or in one in place of another."""

from __future__ import annotations

import select
from collections.abc import Callable
from functools import partial


class Poller:
    """Waits for descriptors by Linux's epoll, and calls their callbacks.

    `poll` is for one thread at a time. The other methods may be called from any thread, even while
    one polls. Callbacks may be called spuriously.

    Attributes:
        wait: waits until a descriptor is ready, at most a number of seconds, as `poll`; but calls
            nothing, and another thread may poll meanwhile.
        mask: from now on, `wait` does not return for these descriptors.
        unmask: it does again, at once if one is ready.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[], None]] = {}
        # Reports that the first one has something to report.
        self._outer = select.epoll()
        self._outer.register(self._epoll, select.EPOLLIN)
        # In C, as each call of a thread that receives its own answers needs them.
        self.wait: Callable[[float], object] = self._outer.poll
        fd = self._epoll.fileno()
        self.mask = partial(self._outer.modify, fd, 0)
        self.unmask = partial(self._outer.modify, fd, select.EPOLLIN)

    def watch_readable(self, fd: int, callback: Callable[[], None]) -> None:
        """Calls ``callback`` whenever ``fd`` can be read.

        Raises:
            OSError: the system allows no more watches; ``fd`` is not watched.
        """
        self._epoll.register(fd, select.EPOLLIN)
        # If it is ready before this line, the next poll reports it again.
        self._callbacks[fd] = callback

    def watch_writable(self, fd: int, callback: Callable[[], None]) -> None:
        """Calls ``callback`` whenever ``fd`` can be written; see `watch_readable`."""
        self._epoll.register(fd, select.EPOLLOUT)
        self._callbacks[fd] = callback

    def forget(self, fd: int) -> None:
        """Stops watching ``fd``. Must be called before ``fd`` is closed."""
        del self._callbacks[fd]
        self._epoll.unregister(fd)

    def poll(self, timeout: float) -> None:
        """Waits until one of the descriptors is ready, at most ``timeout`` seconds."""
        for fd, _ in self._epoll.poll(timeout):
            callback = self._callbacks.get(fd)
            if callback is not None:
                callback()

    def close(self) -> None:
        """Stops watching all descriptors."""
        self._callbacks.clear()
        self._outer.close()
        self._epoll.close()

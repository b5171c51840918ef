"""Waiting for several descriptors at once."""

from __future__ import annotations

import select
from collections.abc import Callable

__all__ = ["Poller", "supports_polling"]


def supports_polling() -> bool:
    """Whether this system has what a `Poller` needs: it is Linux."""
    return hasattr(select, "epoll")


class Poller:
    """Waits for descriptors by Linux's epoll, and calls what each is watched by.

    `poll` is for one thread at a time; the other methods may be called from any thread, also while
    one polls. What is called must put up with being called for nothing.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[], None]] = {}

    def watch_readable(self, fd: int, callback: Callable[[], None]) -> None:
        """Has ``callback`` called whenever ``fd`` can be read.

        Raises:
            OSError: the system can't watch any more; ``fd`` is not watched.
        """
        self._epoll.register(fd, select.EPOLLIN)
        # Should it be ready already, the next poll finds it again.
        self._callbacks[fd] = callback

    def watch_writable(self, fd: int, callback: Callable[[], None]) -> None:
        """Has ``callback`` called whenever ``fd`` can be written.

        Raises:
            OSError: the system can't watch any more; ``fd`` is not watched.
        """
        self._epoll.register(fd, select.EPOLLOUT)
        # Should it be ready already, the next poll finds it again.
        self._callbacks[fd] = callback

    def forget(self, fd: int) -> None:
        """Watches ``fd`` no more; to be called before it is closed."""
        del self._callbacks[fd]
        self._epoll.unregister(fd)

    def poll(self, timeout: float) -> None:
        """Waits until one of the descriptors is ready, at most ``timeout`` seconds."""
        for fd, _ in self._epoll.poll(timeout):
            callback = self._callbacks.get(fd)
            if callback is not None:
                callback()

    def close(self) -> None:
        """Ends the watch."""
        self._callbacks.clear()
        self._epoll.close()

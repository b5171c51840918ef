"""The descriptors that this process may have: all are in use but for as many as a test leaves."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

_SPARE = 64


class Descriptors:
    """Those that are held so that nobody else has them."""

    def __init__(self) -> None:
        self._held: list[int] = []

    @property
    def left(self) -> int:
        """How many others may be opened."""
        before = len(self._held)
        self._take_all()
        left = len(self._held) - before
        self._close(left)
        return left

    def leave(self, number: int) -> None:
        """Leaves this many to others."""
        self._take_all()
        self._close(number)

    def _take_all(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def _close(self, number: int) -> None:
        for _ in range(number):
            os.close(self._held.pop())

    def close(self) -> None:
        self._close(len(self._held))


@contextlib.contextmanager
def few_descriptors(left: int = 0) -> Iterator[Descriptors]:
    """Leaves only this many descriptors to this process, whose limit is low meanwhile."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + _SPARE, before[1]))
    descriptors = Descriptors()
    try:
        descriptors.leave(left)
        yield descriptors
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        descriptors.close()

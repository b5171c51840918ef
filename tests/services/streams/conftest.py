"""What the tests of streams share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from tests.support.identity import Same
from tests.support.waiting import SOON, until


class Tap(Same):
    """A generator that the test watches: how far it is, and whether it was closed.

    In meshes of threads.
    """

    def __init__(self, make: Callable[[int], Any] = int, length: int = 10**9) -> None:
        self.made = 0
        self.closed = threading.Event()
        self._make = make
        self._length = length

    def run(self) -> Iterator[Any]:
        """Yields items; is called remotely."""
        try:
            while self.made < self._length:
                self.made += 1
                yield self._make(self.made - 1)
        finally:
            self.closed.set()

    def await_made(self, number: int) -> None:
        """Waits until this number of items has been made."""
        until(lambda: self.made >= number, lambda: f"{number} items; found {self.made}")

    def await_close(self) -> None:
        """Waits until the generator has ended or was closed."""
        assert self.closed.wait(SOON), "the generator was not closed"


def read_by_threads(stream: Any, number: int) -> list[Any]:
    """Returns the items of a stream that several threads read, sorted."""
    found: list[Any] = []

    def take() -> None:
        while (item := next(stream, None)) is not None:
            found.append(item)

    threads = [threading.Thread(target=take) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    return sorted(found)

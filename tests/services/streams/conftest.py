"""What the tests of streams share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.identity import Same
from tests.support.waiting import SOON, until
from zrpc.testing import Mesh


@pytest.fixture(autouse=True)
def _no_stream_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test with a mesh, no worker has anything of a stream."""
    mesh: Mesh | None = None
    if "caller" in request.fixturenames:
        mesh = request.getfixturevalue("caller")
    yield
    if mesh is not None:
        until(lambda: not left(mesh), lambda: str(left(mesh)))


def left(mesh: Mesh) -> list[tuple[int, str, int]]:
    """Returns what is left of streams: the rank of each worker, what it has, and how many."""
    return [
        (rank, name, number)
        for rank in range(len(mesh))
        for service in mesh.agent(rank).services
        for name, number in service.stats().items()
        if name.startswith("streams_") and number
    ]


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

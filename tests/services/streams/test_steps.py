"""What an item of a stream costs: counts of functions and messages, not times."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

import zrpc
from tests.support.identity import here
from tests.support.waiting import SOON
from zrpc.testing import Mesh

ITEMS = 5000
_ROOT = os.path.dirname(zrpc.__file__)


class Entered:
    """Counts how often some threads enter each function of zrpc."""

    def __init__(self) -> None:
        self._counts = Counter[str]()
        self._ended = False

    def begin(self) -> None:
        """Begins to count in this thread."""
        sys.setprofile(self._note)

    def end(self) -> None:
        """Ends that in all threads."""
        self._ended = True
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if self._ended:
            sys.setprofile(None)
            return
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_ROOT):
            self._counts[code.co_qualname] += 1

    def for_each_item(self) -> dict[str, int]:
        """Returns the functions that each item enters, and how often."""
        found = {name: count // ITEMS for name, count in self._counts.items()}
        return {name: count for name, count in found.items() if count}


KINDS: dict[str, Callable[[int], Any]] = {
    "int": int,
    "str": str,
    "tuple": lambda number: (number, "token"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_item_enters_two_functions_at_its_producer(caller: Mesh, kind: str) -> None:
    made = Entered()

    def generate() -> Iterator[Any]:
        make, threads = KINDS[kind], set[int]()
        for number in range(ITEMS):
            if threading.get_ident() not in threads:  # it has let others have the one before
                threads.add(threading.get_ident())
                made.begin()
            yield make(number)
        made.end()

    with zrpc.rpc_stream("worker1", here(generate), prefetch=2 * ITEMS) as stream:
        assert sum(1 for _ in stream) == ITEMS
    assert sum(made.for_each_item().values()) <= 2, made.for_each_item()


# Its producer is not slowed down by being counted: it would send smaller batches.
@pytest.mark.parametrize("kind", KINDS)
def test_a_small_item_enters_one_function_at_its_reader(caller: Mesh, kind: str) -> None:
    read, ended = Entered(), threading.Event()

    def generate() -> Iterator[Any]:
        yield from map(KINDS[kind], range(ITEMS))
        ended.set()

    before = bytes_moved()
    with zrpc.rpc_stream("worker1", here(generate), prefetch=2 * ITEMS) as stream:
        assert ended.wait(SOON)
        read.begin()
        try:
            first = [next(stream) for _ in range(ITEMS // 2)]
            found = [*first, *stream]
        finally:
            read.end()
    assert found == [KINDS[kind](number) for number in range(ITEMS)]
    assert sum(read.for_each_item().values()) <= 1, read.for_each_item()
    assert bytes_moved() - before < 20 * ITEMS


def bytes_moved() -> int:
    """The bytes that this worker has sent and received; a message for each item has 60 or more."""
    return sum(way.bytes_sent + way.bytes_received for way in zrpc.stats().traffic.values())

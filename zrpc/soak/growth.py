"""How workers have grown from their first quiet moment to their last."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zrpc.soak.inventory import Inventory

__all__ = ["Growth"]

# What a worker may grow by, after its first shift, which has not met yet all that there is: caches
# of torch's and of Python's, one socket for each peer, 4096 ids of contexts that have ended. With
# this, a leak of a kilobyte for each action is found in a minute, and one of 20 bytes in an hour.
_BYTES = 6 << 20
_BLOCKS = 30_000
_OBJECTS = 100
_THREADS = 40
_DESCRIPTORS = 40
# No leak, but what malloc can't give back: it grows for some minutes, in each thread's arena. How
# far depends on the sizes of tensors, so that this bound is a wide one.
_RESIDENT = 256 << 20


class Growth:
    """Inventories of workers, by rank, and what they come to."""

    def __init__(self) -> None:
        self._first: dict[int, Inventory] = {}
        self._last: dict[int, Inventory] = {}

    def add(self, found: dict[int, Inventory]) -> None:
        """Adds those of one quiet moment."""
        self._last.update(found)
        for rank, each in found.items():
            self._first.setdefault(rank, each)

    def forget(self, rank: int) -> None:
        """A worker is dead."""
        self._first.pop(rank, None)
        self._last.pop(rank, None)

    def bytes(self) -> list[tuple[int, int]]:
        """By how many bytes in use, and resident, each has grown."""
        return [
            (last.memory - first.memory, last.resident - first.resident)
            for first, last in ((self._first[rank], last) for rank, last in self._last.items())
        ]

    def violations(self) -> list[str]:
        """What has grown too much, a line for each."""
        return [
            f"rank {rank} has grown from its first quiet moment to its last: {line}"
            for rank, last in self._last.items()
            for line in _too_much(self._first[rank], last)
        ]


def _too_much(first: Inventory, last: Inventory) -> list[str]:
    bounds = {
        "bytes of malloc's in use": (first.memory, last.memory, _BYTES),
        "blocks of Python's in use": (first.blocks, last.blocks, _BLOCKS),
        "resident bytes": (first.resident, last.resident, _RESIDENT),
        "threads": (first.threads, last.threads, _THREADS),
        "descriptors": (first.descriptors, last.descriptors, _DESCRIPTORS),
        **{
            f"objects of {kind}": (first.objects[kind], count, _OBJECTS)
            for kind, count in last.objects.items()
        },
    }
    return [
        f"{now} {what}, {before} before; at most {most} more are expected"
        for what, (before, now, most) in bounds.items()
        if now - before > most
    ]

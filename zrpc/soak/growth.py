"""How workers have grown from their first quiet moment to their last."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zrpc.soak.inventory import Inventory

__all__ = ["Growth"]

# What a worker may grow by. Its own memory: the first shift has not yet met all that there is
# (caches of torch, arenas of malloc for new threads), so that some growth is no leak; a leak of
# 100 bytes for each action is more than that after an hour. Objects are counted exactly, but for
# those that are kept once for each peer.
_BYTES = 48 << 20
_OBJECTS = 100
_THREADS = 40
_DESCRIPTORS = 40


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

    def bytes(self) -> list[int]:
        """By how many bytes each has grown."""
        return [each.memory - self._first[rank].memory for rank, each in self._last.items()]

    def violations(self) -> list[str]:
        """What has grown too much, a line for each."""
        return [
            f"rank {rank} has grown from its first quiet moment to its last: {line}"
            for rank, last in self._last.items()
            for line in _too_much(self._first[rank], last)
        ]


def _too_much(first: Inventory, last: Inventory) -> list[str]:
    bounds = {
        "bytes of its own": (first.memory, last.memory, _BYTES),
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

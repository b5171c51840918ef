"""Checks how much workers have grown from their first idle moment to their last."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zrpc.bench.soak.resources import Resources

__all__ = ["LeakCheck"]

# How much a worker may grow after its first phase. That phase has not yet filled everything: the
# caches of torch and Python, one socket for each peer, 4096 ids of contexts that have ended. With
# these bounds a leak of 1 KB per action is found in a minute, and one of 20 bytes in an hour.
_MAX_BYTES = 6 << 20
_MAX_BLOCKS = 30_000
_MAX_OBJECTS = 100
_MAX_THREADS = 40
_MAX_DESCRIPTORS = 40
# Memory that malloc can't give back, which is no leak: it grows for some minutes, in each thread's
# arena. How far depends on the sizes of tensors, so this bound is wide.
_MAX_RESIDENT_BYTES = 256 << 20


class LeakCheck:
    """The first and last resources of each worker, by rank, and their differences."""

    def __init__(self) -> None:
        self._first: dict[int, Resources] = {}
        self._last: dict[int, Resources] = {}

    def add(self, found: dict[int, Resources]) -> None:
        """Adds the resources of one idle moment."""
        self._last.update(found)
        for rank, each in found.items():
            self._first.setdefault(rank, each)

    def remove(self, rank: int) -> None:
        """Removes a worker that is dead."""
        self._first.pop(rank, None)
        self._last.pop(rank, None)

    def bytes_grown(self) -> list[tuple[int, int]]:
        """Returns for each worker the growth of its bytes in use, and of its resident bytes."""
        return [
            (last.memory - first.memory, last.resident - first.resident)
            for first, last in ((self._first[rank], last) for rank, last in self._last.items())
        ]

    def violations(self) -> list[str]:
        """Returns one line for each resource that has grown too much."""
        return [
            f"rank {rank} has grown from its first idle moment to its last: {line}"
            for rank, last in self._last.items()
            for line in _excess_growth(self._first[rank], last)
        ]


def _excess_growth(first: Resources, last: Resources) -> list[str]:
    bounds = {
        "bytes in use by malloc": (first.memory, last.memory, _MAX_BYTES),
        "blocks in use by Python": (first.blocks, last.blocks, _MAX_BLOCKS),
        "resident bytes": (first.resident, last.resident, _MAX_RESIDENT_BYTES),
        "threads": (first.threads, last.threads, _MAX_THREADS),
        "descriptors": (first.descriptors, last.descriptors, _MAX_DESCRIPTORS),
        **{
            f"objects of {kind}": (first.objects[kind], count, _MAX_OBJECTS)
            for kind, count in last.objects.items()
        },
    }
    return [
        f"{now} {what}, {before} before; expected at most {bound} more"
        for what, (before, now, bound) in bounds.items()
        if now - before > bound
    ]

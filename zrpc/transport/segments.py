"""The sender's side of shared memory: segments that are written, lent to a peer, and reused.

Writing to memory for the first time is 10 to 40 times slower than writing to it again, since
the system has to find each page; so segments are kept, within a bound, and closed when they
have not been used for a while.

A segment is a memfd: memory with a descriptor and no name, which goes when nobody has it open
or mapped, however the processes end.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from typing import Any

__all__ = ["Segment", "SegmentPool", "supports_segments"]

# Of one segment: larger messages use one anyway, smaller ones would waste descriptors.
_SMALLEST = 1 << 17
_ALIGNMENT = 64
# Each segment is an open descriptor here and a mapping at the peer.
_MOST_SEGMENTS = 128
_IDLE_SECONDS = 10.0


def supports_segments() -> bool:
    """Whether this system has memfds that a peer can open."""
    return hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")


class Segment:
    """A piece of shared memory of this process.

    Args:
        number: names it among this worker's segments, for ever.
        size: bytes.

    Attributes:
        borrower: the rank of the worker that it is lent to; None where it is free.
        known_to: the workers that may have it mapped.
        writing: whether a thread copies into it just now; then it is not closed.
        used: when it was last lent or returned, on the clock of ``time.monotonic``.
    """

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size
        self.fd = os.memfd_create(f"zrpc-{number}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, size)
            self._memory = mmap.mmap(self.fd, size)
        except BaseException:
            os.close(self.fd)
            raise
        self.inode = os.fstat(self.fd).st_ino
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.borrower: int | None = None
        self.known_to: set[int] = set()
        self.writing = False
        self.used = time.monotonic()

    def write(self, offset: int, buffer: Any) -> None:
        """Copies a ctypes array to an offset; other threads run meanwhile."""
        ctypes.memmove(self._address + offset, buffer, ctypes.sizeof(buffer))

    def close(self) -> None:
        """Gives up the descriptor and the mapping; a peer that has it mapped keeps it."""
        os.close(self.fd)
        self._memory.close()


class SegmentPool:
    """The segments of one worker. For one thread at a time.

    Args:
        capacity: the most bytes of all segments together.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._segments: dict[int, Segment] = {}
        self._size = 0
        self._next_number = 0
        # Closed while a thread was writing, which closes them in the end.
        self._to_close: set[Segment] = set()
        # Not lent again, for whoever tells the workers that have them mapped.
        self.retired: list[Segment] = []
        self._closed = False

    def __len__(self) -> int:
        return len(self._segments)

    @property
    def size(self) -> int:
        """Bytes of all segments together."""
        return self._size

    @property
    def lent(self) -> int:
        """How many segments peers have."""
        return sum(segment.borrower is not None for segment in self._segments.values())

    @property
    def borrowers(self) -> set[int]:
        """The workers that have segments."""
        return {s.borrower for s in self._segments.values() if s.borrower is not None}

    def lend(self, sizes: list[int], borrower: int) -> tuple[Segment, list[int]] | None:
        """Finds a segment with room for buffers of these sizes.

        It is to be written to, until `written` is called.

        Returns:
            The segment and the offset of each buffer; None where the pool is full.
        """
        offsets, end = [], 0
        for size in sizes:
            offsets.append(end)
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        if self._closed or end > self._capacity:
            return None
        segment = self._free_one(end) or self._new_one(end)
        if segment is None:
            return None
        segment.writing = True
        segment.borrower = borrower
        segment.known_to.add(borrower)
        segment.used = time.monotonic()
        return segment, offsets

    def written(self, segment: Segment) -> bool:
        """The thread that writes to a segment is done; False where it was closed meanwhile."""
        segment.writing = False
        if segment in self._to_close:
            self._to_close.discard(segment)
            segment.close()
            return False
        return True

    def give_back(self, number: int, borrower: int) -> None:
        """The borrower needs a segment no more: it can be used again."""
        segment = self._segments.get(number)
        if segment is not None and segment.borrower == borrower:
            segment.borrower = None
            segment.used = time.monotonic()

    def give_up(self, number: int, borrower: int) -> None:
        """The borrower may go on to use a segment: it is never used again here."""
        segment = self._segments.get(number)
        if segment is not None and segment.borrower == borrower:
            self._close(segment)

    def lose(self, borrower: int) -> None:
        """A worker has left the mesh, but its process may still use what it has."""
        for segment in [s for s in self._segments.values() if s.borrower == borrower]:
            self._close(segment)

    def shrink(self, now: float) -> None:
        """Closes free segments that were not used for a while."""
        for segment in self._free():
            if now - segment.used > _IDLE_SECONDS:
                self._close(segment)

    def close(self) -> None:
        """Closes all segments; none is lent any more."""
        self._closed = True
        for segment in list(self._segments.values()):
            self._close(segment)

    def _free(self) -> list[Segment]:
        return [segment for segment in self._segments.values() if segment.borrower is None]

    def _free_one(self, size: int) -> Segment | None:
        """The smallest free segment that fits and is not far too large."""
        fitting = [segment for segment in self._free() if size <= segment.size <= 4 * size]
        return min(fitting, key=lambda segment: segment.size, default=None)

    def _new_one(self, size: int) -> Segment | None:
        # With room to spare, so that messages that grow a little find it again.
        size = max(_SMALLEST, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
        if size > self._capacity:
            return None
        for segment in sorted(self._free(), key=lambda segment: segment.used):
            if self._size + size <= self._capacity and len(self) < _MOST_SEGMENTS:
                break
            self._close(segment)
        if self._size + size > self._capacity or len(self) >= _MOST_SEGMENTS:
            return None
        try:
            segment = Segment(self._next_number, size)
        except OSError:
            return None  # out of descriptors or memory: frames need neither
        self._next_number += 1
        self._segments[segment.number] = segment
        self._size += segment.size
        return segment

    def _close(self, segment: Segment) -> None:
        del self._segments[segment.number]
        self._size -= segment.size
        self.retired.append(segment)
        if segment.writing:
            self._to_close.add(segment)
        else:
            segment.close()

"""The sender's side of shared memory: segments that are written, lent to peers, and reused.

A message is copied into a free segment, which is lent to its receiver. What this worker sends to
many peers, or again and again, it *holds* in a segment: that is lent to each of them, and nothing
is copied. A segment is free when nobody has it, neither this worker nor a peer.

Writing to memory for the first time is slower than writing to it again, since the system has to
find each page. So segments are kept, within a bound, and closed when they have not been used for a
while. A fresh segment is written by ``pwrite``: a page that is filled need not be cleared, and
causes no page fault. A segment that is used again is mapped. Measured for 100 MB, in processor
time: 50 ms by ``pwrite`` and 85 through a mapping if the segment is fresh; later 35 and 12.

A segment is a memfd: memory with a descriptor and no name, which is freed when no process has it
open or mapped, however the processes exit. A message says by records which segments have its
buffers, and where; notes say what becomes of segments.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import struct
import time
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import attrgetter
from typing import Any

from zrpc.wire.member_id import MemberId
from zrpc.wire.page_locks import MappedMemory, page_locks

# Messages that use a segment are larger anyway; smaller segments would waste descriptors.
_MIN_SEGMENT_BYTES = 1 << 17
_ALIGNMENT_BYTES = 64
# What is held again and again, such as versions of a model, needs two segments beside those that
# its readers have; more free ones would only take memory.
_MAX_FREE_HELD = 2
# The maximum of one worker. Each is an open descriptor here and a mapping at the peer.
MAX_SEGMENTS = 128

# Python's own mmap.madvise would keep the interpreter's lock.
_libc = ctypes.CDLL(None)
_MADV_POPULATE_WRITE = 23

NOTE = struct.Struct("<BQ")  # verb, number of the segment


class Verb(IntEnum):
    """What a note about a segment says."""

    RETURN = 1  # use this segment again
    KEEP = 2  # never use this segment again: I may read it without limit, or can't open it
    CLOSED = 3  # this segment is not lent again
    CHECK = 4  # have you still borrowed this segment? Else the message, or its return, is lost


Place = tuple[int, int]  # offset and size of a buffer
_RECORD = struct.Struct("<QQ")  # number of a segment, how many places follow
_PLACE = struct.Struct("<QQ")


def record(number: int, offsets: Sequence[int], sizes: Sequence[int]) -> bytes:
    """Returns what a message says of the buffers that it has in one segment."""
    return b"".join((_RECORD.pack(number, len(sizes)), *map(_PLACE.pack, offsets, sizes)))


def read_records(data: bytes) -> list[tuple[int, list[Place]]]:
    """Returns the numbers of the segments that a message names, each with its places."""
    found, start = [], 0
    while start < len(data):
        number, count = _RECORD.unpack_from(data, start)
        start += _RECORD.size
        end = start + count * _PLACE.size
        found.append((number, list(_PLACE.iter_unpack(data[start:end]))))
        start = end
    return found


class Segment:
    """A piece of shared memory of this process, of ``size`` bytes.

    Attributes:
        number: its number among this worker's segments; never reused.
        borrowers: the workers that it is lent to, and how often.
        checked: when it was last lent, or its borrowers were asked whether they still have it.
        known_to: the workers that have got its descriptor.
        held: whether this worker holds it, to lend it again.
        buffer: the buffer in it that this worker holds it for.
        shared: whether it is held for a `Share`: then no other message lends it.
        address: where it is mapped, if it is.
        was_held: whether this worker was the last one to write to it so.
        kept_by: borrowers that may use it without limit; so it is not written again.
        writing: whether a thread is copying into it; then it is not closed.
        fresh: whether no message was written to it yet.
        used: since when nobody has it, on the clock of ``time.monotonic``.
    """

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size
        self.fd = os.memfd_create(f"zrpc-{number}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        except BaseException:
            os.close(self.fd)
            raise
        self._memory: MappedMemory | None = None
        self.address = 0
        self.buffer: weakref.ref[Any] | None = None
        self.shared = False
        self.fresh = True
        self.borrowers: Counter[MemberId] = Counter()
        self.checked = 0.0
        self.known_to: set[MemberId] = set()
        self.held = self.was_held = False
        self.kept_by: set[MemberId] = set()
        self.writing = False
        self.used = time.monotonic()

    @property
    def in_use(self) -> bool:
        """Whether anybody has it."""
        return self.held or bool(self.borrowers)

    def hold(self, size: int) -> Any:
        """Returns the first bytes of the segment as a buffer, which keeps them mapped.

        Raises:
            OSError: there is no memory left.
        """
        if self.fresh:
            # Else a write to memory that the system can't find ends this process.
            os.posix_fallocate(self.fd, 0, self.size)
        if self._memory is None:
            self._map()
        if self._memory is None:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return (ctypes.c_char * size).from_buffer(self._memory)

    def write(self, offset: int, buffer: Any) -> None:
        """Copies a contiguous buffer to an offset; other threads can run meanwhile.

        Raises:
            OSError: there is no memory left.
        """
        rest = memoryview(buffer).cast("B")
        if not self.fresh and self._memory is None:
            self._map()
        if self._memory is not None and not rest.readonly:
            source = (ctypes.c_char * rest.nbytes).from_buffer(rest)
            ctypes.memmove(self.address + offset, source, rest.nbytes)
            return
        while rest:  # the system writes 2 GiB at a time at most
            count = os.pwrite(self.fd, rest, offset)
            rest, offset = rest[count:], offset + count

    def _map(self) -> None:
        """Maps the segment, with all its pages at once; or not, if the system refuses."""
        with contextlib.suppress(OSError):
            self._memory = MappedMemory(self.fd, self.size)
            self.address = self._memory.address
            page_locks.add(self._memory)
            # Without this each page costs a fault at its first use. An older Linux has no such
            # advice, and does nothing.
            address, size = ctypes.c_void_p(self.address), ctypes.c_size_t(self.size)
            _libc.madvise(address, size, _MADV_POPULATE_WRITE)

    def close(self) -> None:
        """Closes the descriptor and the mapping; a peer that has it mapped keeps the memory.

        If this worker holds it, it stays mapped until the last view of it is freed.
        """
        os.close(self.fd)
        self._memory = None


@dataclass(slots=True, eq=False)
class Share:
    """Buffers in a segment that is held, which messages to several workers may name.

    Each reader maps it privately, so that none sees what another one writes.

    Attributes:
        segment: has the buffers.
        record: says where, for the messages.
        memory: the segment is held as long as this lives.
    """

    segment: Segment
    record: bytes
    memory: Any

    def blocks(self) -> list[memoryview]:
        """Returns the buffers, for messages that can't name the segment."""
        whole = memoryview(self.memory).cast("B")
        ((_, places),) = read_records(self.record)
        return [whole[offset : offset + size] for offset, size in places]


class SegmentPool:
    """The segments of one worker. For one thread at a time.

    Args:
        capacity: the maximum number of bytes of all segments together.

    Attributes:
        segments: all segments by number.
        size: the number of bytes of all segments together.
        retired: segments that are not lent again, until the workers that have them mapped are told.
        ended: the weak references to held buffers that have been freed; any thread may append.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.segments: dict[int, Segment] = {}
        self.size = 0
        self._next_number = 0
        self.retired: list[Segment] = []
        self.ended: deque[weakref.ref[Any]] = deque()
        self._closed = False

    def __len__(self) -> int:
        return len(self.segments)

    @property
    def lent(self) -> int:
        """The number of segments that are lent."""
        return sum(bool(segment.borrowers) for segment in self.segments.values())

    def lend(self, sizes: list[int], borrower: MemberId) -> tuple[Segment, list[int]] | None:
        """Lends a segment with room for buffers of these sizes.

        The caller writes to it, and then calls `written`; or only `unused`. Returns the segment and
        the offset of each buffer; None if the pool is full, or the system refuses a segment.
        """
        offsets, end = aligned(sizes)
        try:
            segment = self._take(end)
        except OSError:  # out of descriptors or memory; frames need neither
            return None
        if segment is None:
            return None
        segment.was_held = False
        segment.borrowers[borrower] = 1
        segment.checked = time.monotonic()
        return segment, offsets

    def hold(self, size: int) -> Segment | None:
        """Takes a segment for this worker itself; returns None if the pool is full.

        The caller maps it by `Segment.hold`, and calls `written`, and `hold_until_freed` or `drop`.

        Raises:
            OSError: the system refuses a segment: there is no descriptor left, for example.
        """
        segment = self._take(size)
        if segment is not None:
            segment.held = segment.was_held = True
        return segment

    def _take(self, size: int) -> Segment | None:
        segment = None if self._closed else self._find_free(size) or self._make_segment(size)
        if segment is not None:
            segment.writing = True
        return segment

    def lend_held(self, segment: Segment, borrower: MemberId) -> bool:
        """Lends a segment that this worker holds; returns False if that is not possible."""
        if segment.number not in self.segments or borrower in segment.kept_by:
            return False
        segment.borrowers[borrower] += 1
        segment.checked = time.monotonic()
        return True

    def hold_until_freed(self, segment: Segment, buffer: Any, shared: bool) -> None:
        """Holds a segment until the buffer at its beginning is freed.

        Args:
            segment: as returned by `hold`.
            buffer: an array of ctypes, see `zrpc.services.shm.borrowed.Loans.borrow`.
            shared: see `Segment`. The readers of a `Share` must not map it otherwise.
        """
        segment.buffer = weakref.ref(buffer, self.ended.append)
        segment.shared = shared

    def find(self, buffers: Sequence[Any], sizes: list[int]) -> tuple[Segment, list[int]] | None:
        """Returns the held segment in which all these buffers lie, and the offset of each."""
        held = [s for s in self.segments.values() if s.buffer is not None and not s.shared]
        if not held:
            return None
        try:
            starts = [ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in buffers]
        except (TypeError, ValueError):  # memory that can't be written, or none: not a segment's
            return None
        end = max(start + size for start, size in zip(starts, sizes, strict=True))
        for segment in held:
            if segment.address <= min(starts) and end <= segment.address + segment.size:
                return segment, [start - segment.address for start in starts]
        return None

    def release_ended(self) -> None:
        """Holds what is freed no longer: it is used again when its borrowers have returned it."""
        while self.ended:
            buffer = self.ended.popleft()
            for segment in [each for each in self.segments.values() if each.buffer is buffer]:
                segment.held, segment.buffer = False, None
                self._settle(segment)

    def drop(self, segment: Segment) -> None:
        """Closes a segment that was taken by `hold`: there was no memory for all of its pages."""
        segment.held = False
        if segment.number in self.segments:
            self._close(segment)

    def written(self, segment: Segment) -> bool:
        """Ends the writing to a segment; returns False if it was retired meanwhile."""
        segment.writing = segment.fresh = False
        kept = segment.number in self.segments
        if not kept:
            segment.close()
        return kept

    def unused(self, segment: Segment, borrower: MemberId) -> None:
        """Takes back a segment that was lent, if the borrower does not know of it yet."""
        segment.writing = False
        self._take_back(segment, borrower)

    def give_back(self, number: int, borrower: MemberId) -> None:
        """Takes a segment back from its borrower: it can be used again."""
        segment = self.segments.get(number)
        # While it is written to, its borrower can't have it yet.
        if segment is not None and borrower in segment.borrowers and not segment.writing:
            self._take_back(segment, borrower)

    def retire(self, number: int, borrower: MemberId) -> None:
        """Never writes to a segment again, since its borrower may go on using it."""
        segment = self.segments.get(number)
        if segment is not None and borrower in segment.borrowers:
            segment.kept_by.add(borrower)
            self._take_back(segment, borrower)

    def retire_lent_to(self, borrower: MemberId) -> None:
        """Never lends again what a worker has: it has left, but its process may still use it."""
        for segment in [s for s in self.segments.values() if borrower in s.borrowers]:
            segment.borrowers[borrower] = 1
            self.retire(segment.number, borrower)

    def _take_back(self, segment: Segment, borrower: MemberId) -> None:
        segment.borrowers[borrower] -= 1
        if not segment.borrowers[borrower]:
            del segment.borrowers[borrower]
        self._settle(segment)

    def _settle(self, segment: Segment) -> None:
        """Deals with a segment that nobody may have any longer."""
        if segment.in_use or segment.number not in self.segments:
            return
        segment.used = time.monotonic()
        if segment.kept_by or (segment.was_held and self._alike(segment) > _MAX_FREE_HELD):
            self._close(segment)

    def _alike(self, segment: Segment) -> int:
        """Returns how many free segments were held and are as large as this one."""
        return sum(each.was_held and each.size == segment.size for each in self._free())

    def unchecked(self, since: float) -> list[Segment]:
        """Returns the lent segments that were not lent or checked since a time."""
        return [
            s for s in self.segments.values() if s.borrowers and s.checked < since and not s.writing
        ]

    def close_idle(self, unused_since: float) -> None:
        """Closes free segments that were last used before a time."""
        for segment in self._free():
            if segment.used < unused_since:
                self._close(segment)

    def close(self) -> None:
        """Closes all segments, and lends none from now on."""
        self._closed = True
        for segment in list(self.segments.values()):
            self._close(segment)

    def _free(self) -> list[Segment]:
        # Not by `in_use`, a call for each.
        return [each for each in self.segments.values() if not (each.held or each.borrowers)]

    def _find_free(self, size: int) -> Segment | None:
        """Returns the smallest free segment that fits and is not far too large, if any."""
        fitting = [segment for segment in self._free() if size <= segment.size <= 4 * size]
        return min(fitting, key=attrgetter("size"), default=None)

    def _make_segment(self, size: int) -> Segment | None:
        # With room to spare, so that it fits messages that grow a little.
        size = max(_MIN_SEGMENT_BYTES, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
        if size > self._capacity:
            return None
        for segment in sorted(self._free(), key=attrgetter("used")):
            if self.size + size <= self._capacity and len(self) < MAX_SEGMENTS:
                break
            self._close(segment)
        if self.size + size > self._capacity or len(self) >= MAX_SEGMENTS:
            return None
        segment = Segment(self._next_number, size)
        self._next_number += 1
        self.segments[segment.number] = segment
        self.size += segment.size
        return segment

    def _close(self, segment: Segment) -> None:
        del self.segments[segment.number]
        self.size -= segment.size
        self.retired.append(segment)
        if not segment.writing:  # else the thread that writes closes it
            segment.close()


def aligned(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Returns the offset of each buffer in a segment, by their sizes, and where they end."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return offsets, end

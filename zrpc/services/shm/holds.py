"""What a worker holds in segments of its own, to lend it to many peers without a copy."""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zrpc.services.shm.records import read_records
from zrpc.services.shm.segments import Segment


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


class Holds:
    """The buffers of one worker that lie in its own segments. For one thread at a time.

    Attributes:
        ended: the weak references to buffers that have been freed; any thread may append.
    """

    def __init__(self) -> None:
        self.ended: deque[weakref.ref[Any]] = deque()
        # The address of each buffer and its segment, by the identity of the weak reference.
        self._held: dict[int, tuple[weakref.ref[Any], int | None, Segment]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def add(self, buffer: Any, segment: Segment, found: bool) -> None:
        """Notes that a buffer lies at the beginning of a segment.

        Args:
            buffer: an array of ctypes, see `zrpc.services.shm.borrowed.Loans.borrow`.
            segment: what it is in; it is held until the buffer is freed.
            found: whether `find` finds it. The readers of a `Share` must not map it otherwise.
        """
        watched = weakref.ref(buffer, self.ended.append)
        address = ctypes.addressof(buffer) if found else None
        self._held[id(watched)] = (watched, address, segment)

    def released(self) -> list[Segment]:
        """Takes out and returns the segments whose buffers are freed."""
        segments = []
        while self.ended:
            segments.append(self._held.pop(id(self.ended.popleft()))[2])
        return segments

    def find(self, buffers: Sequence[Any], sizes: list[int]) -> tuple[Segment, list[int]] | None:
        """Returns the segment in which all these buffers lie, and the offset of each, if any."""
        try:
            starts = [ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in buffers]
        except (TypeError, ValueError):  # memory that can't be written, or none: not a segment's
            return None
        ends = [start + size for start, size in zip(starts, sizes, strict=True)]
        for _, address, segment in self._held.values():
            if address is None:
                continue
            if address <= min(starts) and max(ends) <= address + segment.size:
                return segment, [start - address for start in starts]
        return None

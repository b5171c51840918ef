"""Segments that several workers read at once: who reads which, and when one is free again.

The owner keeps such a segment as if it were lent to itself. It is free again when all messages
that name it are sent, and all readers have returned it. Each reader maps it privately, so that none
sees what another one writes. No I/O in here.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from zrpc.services.shm.segments import Segment, SegmentPool
from zrpc.wire.member_id import MemberId

__all__ = ["Share", "SharedSegments"]


class Share:
    """Buffers in a segment that several messages name. Messages may name it as long as it lives.

    Args:
        segment: has the buffers.
        record: says where, for the messages.
        ended: gets the segment's number when this is dropped, in any thread, at any moment.
    """

    __slots__ = ("_ended", "record", "segment")

    def __init__(self, segment: Segment, record: bytes, ended: deque[int]) -> None:
        self.segment = segment
        self.record = record
        self._ended = ended

    def __del__(self) -> None:
        self._ended.append(self.segment.number)  # only notes it, as a finalizer may do no more


@dataclass(slots=True)
class _Readers:
    """The loans of one segment.

    Attributes:
        loans: how many each member has.
        shared: whether the `Share` lives.
        spoiled: whether a reader may go on reading, so that it is not written again.
    """

    loans: Counter[MemberId] = field(default_factory=Counter)
    shared: bool = True
    spoiled: bool = False


class SharedSegments:
    """The shared segments of one worker. For one thread at a time, except for `ended`.

    Args:
        pool: lends them to this worker.
        own_id: this worker.

    Attributes:
        ended: the numbers of the segments whose `Share` has been dropped.
    """

    def __init__(self, pool: SegmentPool, own_id: MemberId) -> None:
        self._pool = pool
        self._own_id = own_id
        self._readers: dict[int, _Readers] = {}
        self.ended: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._readers)

    def share(self, segment: Segment, record: bytes) -> Share:
        """Returns the share of a segment that is written and lent to this worker."""
        self._readers[segment.number] = _Readers()
        return Share(segment, record, self.ended)

    def lend(self, number: int, member: MemberId) -> bool:
        """Counts a message that names a segment; returns False if none may do so any longer."""
        readers = self._readers.get(number)
        if readers is None or readers.spoiled:
            return False
        readers.loans[member] += 1
        return True

    def end_loan(self, number: int, member: MemberId, spoiled: bool = False) -> bool:
        """Ends a loan: it was returned, or the message was not sent.

        Returns:
            False if this is no shared segment that the member has.
        """
        readers = self._readers.get(number)
        if readers is None or not readers.loans[member]:
            return False
        readers.loans[member] -= 1
        readers.spoiled |= spoiled
        self._free_if_unused(number, readers)
        return True

    def spoil(self, number: int) -> None:
        """Never writes a segment again: a part of a message that names it may have been sent."""
        if (readers := self._readers.get(number)) is not None:
            readers.spoiled = True

    def forget(self, member: MemberId) -> None:
        """Ends the loans of a member that is lost; its process may still read."""
        for number, readers in list(self._readers.items()):
            if readers.loans.pop(member, 0):
                readers.spoiled = True
                self._free_if_unused(number, readers)

    def settle(self) -> None:
        """Notes the shares that have been dropped."""
        while self.ended:
            number = self.ended.popleft()
            if (readers := self._readers.get(number)) is not None:
                readers.shared = False
                self._free_if_unused(number, readers)

    def _free_if_unused(self, number: int, readers: _Readers) -> None:
        if not readers.shared and not any(readers.loans.values()):
            del self._readers[number]
            end = self._pool.retire if readers.spoiled else self._pool.give_back
            end(number, self._own_id)

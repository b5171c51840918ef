"""The pool of segments: what is lent, used again, closed, and how much there is."""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.services.shm.sharing import MIB, inode_of, segments_mapped, segments_open
from zrpc.services.shm.segments import Segment, SegmentPool

NEVER, ALWAYS = 0.0, float("inf")


@pytest.fixture
def pool() -> Iterator[Any]:
    pool = SegmentPool(8 * MIB)
    yield pool
    pool.close()


def lend(pool: SegmentPool, size: int, borrower: int = 1) -> Segment:
    lent = pool.lend([size], borrower)
    assert lent is not None
    assert pool.written(lent[0])
    return lent[0]


def shrink(pool: SegmentPool, now: float) -> list[Segment]:
    """Has the pool close what was not used for long; which segments these were."""
    before = list(pool.segments.values())
    pool.close_idle(now - 10.0)
    return [segment for segment in before if segment not in pool.segments.values()]


def fill(segment: Segment, offset: int, data: bytes) -> None:
    segment.write(offset, (ctypes.c_char * len(data)).from_buffer_copy(data))


def content(segment: Segment, offset: int, size: int) -> bytes:
    """What a peer would read."""
    fd = os.open(f"/proc/{os.getpid()}/fd/{segment.fd}", os.O_RDONLY)
    try:
        return os.pread(fd, size, offset)
    finally:
        os.close(fd)


def test_a_segment_is_mapped_when_it_is_used_again_and_not_before(pool: Any) -> None:
    for number in range(3):
        segment, offsets = pool.lend([MIB, 100], 1)
        fill(segment, offsets[0], bytes([number]) * MIB)
        fill(segment, offsets[1], bytes([10 + number]) * 100)
        assert segments_mapped() == ([inode_of(segment)] if number else [])
        assert pool.written(segment)
        assert content(segment, offsets[0], MIB) == bytes([number]) * MIB
        assert content(segment, offsets[1], 100) == bytes([10 + number]) * 100
        pool.give_back(segment.number, 1)
    assert len(pool) == 1


def test_a_segment_that_cannot_be_mapped_is_written_nevertheless(
    pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = lend(pool, MIB)
    pool.give_back(segment.number, 1)
    assert lend(pool, MIB) is segment

    def refuse(*_: Any) -> Any:
        raise OSError(errno.ENOMEM, "no room for a mapping")

    monkeypatch.setattr("zrpc.services.shm.segments.MappedMemory", refuse)
    fill(segment, 64, b"x" * 1000)
    assert content(segment, 0, 1065) == bytes(64) + b"x" * 1000 + b"\0"
    assert segments_mapped() == []


def test_free_segments_make_room_for_larger_ones(pool: Any) -> None:
    small = [lend(pool, MIB) for _ in range(8)]
    for segment in small[:6]:
        pool.give_back(segment.number, 1)
    lend(pool, 5 * MIB)
    assert pool.size <= 8 * MIB
    assert pool.lent == 3
    assert pool.lend([2 * MIB], 1) is None


def test_a_message_larger_than_the_pool_leaves_it_as_it_is(pool: Any) -> None:
    segment = lend(pool, MIB)
    pool.give_back(segment.number, 1)
    assert pool.lend([8 * MIB + 1], 1) is None
    assert pool.lend([5 * MIB, 5 * MIB], 1) is None
    assert lend(pool, MIB) is segment


def test_a_small_message_does_not_take_a_segment_that_is_far_too_large(pool: Any) -> None:
    segment = lend(pool, 4 * MIB)
    pool.give_back(segment.number, 1)
    assert lend(pool, MIB // 4) is not segment
    assert lend(pool, 3 * MIB) is segment


def test_use_counts_from_the_return(pool: Any) -> None:
    segment = lend(pool, MIB)
    segment.used -= 3600  # lent for an hour
    pool.give_back(segment.number, 1)
    assert shrink(pool, time.monotonic()) == []


def test_what_is_being_written_can_not_be_returned(pool: Any) -> None:
    segment, _ = pool.lend([MIB], 1)
    pool.give_back(segment.number, 1)  # a hostile borrower guesses the number
    assert pool.lent == 1
    assert pool.written(segment)
    pool.give_back(segment.number, 1)
    assert pool.lent == 0


def test_a_closed_pool_has_nothing_and_lends_nothing(pool: Any) -> None:
    for borrower in range(3):
        lend(pool, MIB, borrower)
    pool.give_back(0, 0)
    pool.close()
    assert (len(pool), pool.lent, pool.size) == (0, 0, 0)
    assert segments_open() == segments_mapped() == []
    assert pool.lend([MIB], 1) is None  # a thread that was about to send
    assert segments_open() == []


@pytest.mark.parametrize("end", ["lose", "close"])
def test_a_segment_is_not_closed_while_a_thread_writes_to_it(pool: Any, end: str) -> None:
    pool.give_back(lend(pool, MIB).number, 1)
    segment, _ = pool.lend([MIB], 1)
    fill(segment, 0, b"b")  # again, so it is mapped
    other = lend(pool, MIB)
    pool.retire_lent_to(1) if end == "lose" else pool.close()
    assert (len(pool), pool.size) == (0, 0)
    assert segments_open() == segments_mapped() == [inode_of(segment)]
    fill(segment, 0, b"a" * MIB)
    assert other not in pool.segments.values()
    assert not pool.written(segment)
    assert segments_open() == segments_mapped() == []


def test_a_pool_has_a_maximum_number_of_segments() -> None:
    pool = SegmentPool(1 << 40)
    try:
        numbers = []
        while (lent := pool.lend([1 << 17], 1)) is not None:
            pool.written(lent[0])
            numbers.append(lent[0].number)
            assert len(numbers) <= 512, "each is a descriptor here and at a peer"
        pool.give_back(numbers[7], 1)
        assert lend(pool, 1 << 17).number == numbers[7]
    finally:
        pool.close()


@pytest.mark.parametrize("step", ["os.memfd_create", "os.ftruncate"])
def test_if_the_system_has_no_more_nothing_is_lent_or_left_behind(
    pool: Any, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(f"zrpc.services.shm.segments.{step}", refuse)
    assert pool.lend([MIB], 1) is None
    assert (len(pool), pool.size, segments_open()) == (0, 0, [])
    monkeypatch.undo()
    lend(pool, MIB)


CAPACITY = 2 * MIB
SIZES = st.integers(8, CAPACITY // 3)
BORROWERS = st.integers(0, 2)


class PoolMachine(RuleBasedStateMachine):
    """In any order of events, no segment is written while anybody may read it."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SegmentPool(CAPACITY)
        self.lent: list[tuple[Segment, int]] = []
        self.held: list[Segment] = []
        self.buffers: dict[int, Any] = {}
        self.stamps: dict[int, tuple[int, bytes]] = {}
        self.worn: set[int] = set()  # what a borrower may go on reading

    def teardown(self) -> None:
        self.buffers.clear()
        self.pool.close()
        assert segments_open() == segments_mapped() == []

    def used(self) -> set[int]:
        return {each.number for each in (*self.held, *(segment for segment, _ in self.lent))}

    def stamp(self, segment: Segment, place: int) -> None:
        """Writes something to a segment that nobody else uses."""
        assert segment.number not in self.used() | self.worn
        stamp = os.urandom(8)
        fill(segment, place, stamp)
        assert self.pool.written(segment)
        self.stamps[segment.number] = place, stamp

    def is_full(self, *sizes: int) -> bool:
        return bool(self.used()) or sum(sizes) + 64 * len(sizes) > CAPACITY - 4096

    @rule(sizes=st.lists(SIZES, min_size=1, max_size=4), borrower=BORROWERS)
    def lend(self, sizes: list[int], borrower: int) -> None:
        lent = self.pool.lend(sizes, borrower)
        if lent is None:
            assert self.is_full(*sizes)
            return
        segment, offsets = lent
        assert not any(offset % 64 for offset in offsets)
        self.stamp(segment, offsets[-1] + sizes[-1] - 8)
        self.lent.append((segment, borrower))

    @rule(size=SIZES)
    def hold(self, size: int) -> None:
        segment = self.pool.hold(size)
        if segment is None:
            assert self.is_full(size)
            return
        buffer = self.buffers[segment.number] = segment.hold(size)
        self.stamp(segment, size - 8)
        self.pool.hold_until_freed(segment, buffer, shared=False)
        self.held.append(segment)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), borrower=BORROWERS)
    def lend_held(self, data: Any, borrower: int) -> None:
        segment = data.draw(st.sampled_from(self.held))
        if self.pool.lend_held(segment, borrower):
            self.lent.append((segment, borrower))
        else:
            assert segment.number in self.worn

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        segment = data.draw(st.sampled_from(self.held))
        self.held.remove(segment)
        del self.buffers[segment.number]
        self.pool.release_ended()

    @precondition(lambda self: self.lent)
    @rule(data=st.data(), keeps=st.booleans())
    def give_back(self, data: Any, keeps: bool) -> None:
        loan = data.draw(st.sampled_from(self.lent))
        self.lent.remove(loan)
        segment, borrower = loan
        if keeps:
            self.worn.add(segment.number)
        (self.pool.retire if keeps else self.pool.give_back)(segment.number, borrower)

    @precondition(lambda self: self.lent)
    @rule(data=st.data(), borrower=BORROWERS)
    def give_back_what_is_another_workers(self, data: Any, borrower: int) -> None:
        number = data.draw(st.sampled_from(self.lent))[0].number
        if (number, borrower) not in [(segment.number, of) for segment, of in self.lent]:
            self.pool.give_back(number, borrower)
            self.pool.retire(number, borrower)

    @rule(borrower=BORROWERS)
    def lose(self, borrower: int) -> None:
        self.worn |= {segment.number for segment, of in self.lent if of == borrower}
        self.lent = [loan for loan in self.lent if loan[1] != borrower]
        self.pool.retire_lent_to(borrower)

    @rule(now=st.sampled_from([NEVER, ALWAYS]))
    def shrink(self, now: float) -> None:
        before = len(self.pool)
        shrink(self.pool, now)
        assert len(self.pool) == (len(self.used()) if now == ALWAYS else before)

    @rule()
    def no_others_are_mapped(self) -> None:
        mapped = {inode_of(segment) for segment in self.pool.segments.values()}
        assert mapped.issuperset(segments_mapped())  # what was held or used again

    @invariant()
    def the_books_are_right(self) -> None:
        segments = self.pool.segments
        sizes = {inode_of(segment): segment.size for segment in segments.values()}
        assert self.used() <= set(segments)
        assert self.pool.lent == len({segment.number for segment, _ in self.lent})
        assert self.pool.size == sum(sizes.values()) <= CAPACITY
        assert segments_open() == sorted(sizes)
        for number in self.used():
            place, stamp = self.stamps[number]
            assert content(segments[number], place, 8) == stamp


TestPoolMachine = pytest.mark.system(PoolMachine.TestCase)
TestPoolMachine.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    suppress_health_check=list(HealthCheck),
)

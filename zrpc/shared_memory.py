"""Large tensors between workers of one host: by shared memory in place of frames.

The sender copies the large buffers of a message into a segment of its own, and the message
says where. The receiver maps the segment, its tensors are views of it, and when they are gone
it gives the segment back, to be used again: with the next message that goes to the sender, often
the answer, else by a message of its own. So there is one copy in and none out.

Whether a peer can open a segment is tried when there is first something large for it (OFFER,
answered by ACCEPT); until then, where it can't, and where the pool is full, frames do.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import struct
import threading
import time
import weakref
from enum import IntEnum
from typing import Any, ClassVar

from zrpc.agent import Agent
from zrpc.errors import ProtocolError
from zrpc.transport.loans import Descriptor, Loan, Loans
from zrpc.transport.segments import Segment, SegmentPool, supports_segments
from zrpc.wire.header import Message
from zrpc.wire.kind import Kind

__all__ = ["SharedMemoryLayer", "plug_in"]

# The tags of the extensions that say which buffers of a message are where, and which segments
# are returned with it.
SHARED = 5
RETURNED = 6

# Messages whose large buffers are smaller than this in all go by frames: finding and giving
# back a segment costs more than copying the bytes through a socket. Measured, there and back:
# 128 KiB take 150 us by a segment and 120 us by a direct connection, 250 KiB the same by both.
LEAST_BYTES = 1 << 18

_DESCRIPTOR = struct.Struct("<QIIQQ")  # number, pid, fd, inode, size
_PLACE = struct.Struct("<IQQ")  # index of the buffer, offset, size
_NOTE = struct.Struct("<BQ")  # verb, number of the segment
_NUMBER = struct.Struct("<Q")  # of a segment


class _Verb(IntEnum):
    """What a message about segments says."""

    OFFER = 1  # can you open this segment? (with a descriptor)
    ACCEPT = 2  # I can
    RETURN = 3  # use this segment again
    KEEP = 4  # never use this segment again, I may read it for ever
    CLOSED = 5  # this segment is not lent again
    ASK = 6  # have you opened what I have lent you? (with the number of the question)
    OPEN = 7  # I have (likewise)


class SharedMemoryLayer:
    """Plugs shared memory into an agent.

    Args:
        agent: the agent; this layer registers its handlers there.
        capacity: the most bytes that this worker's segments have together.
    """

    # Those of this process, for fork, by their identity. Not a set: another thread may add one
    # while a fork looks at them, and `valuerefs` alone puts up with that.
    _all: ClassVar[weakref.WeakValueDictionary[int, SharedMemoryLayer]] = (
        weakref.WeakValueDictionary()
    )

    def __init__(self, agent: Agent, capacity: int) -> None:
        self.agent = agent
        # Guards the pool and what has been borrowed, which any thread that sends uses.
        self._lock = threading.Lock()
        self.pool = SegmentPool(capacity)
        self.loans = Loans()
        # What to tell the owners of loans that have ended: RETURN or KEEP, and which segment.
        self._to_return: dict[int, list[tuple[_Verb, int]]] = {}
        self._accepted: set[int] = set()
        self._offered: set[int] = set()
        # The question whether a borrower has opened what it was lent last, where it was asked; 0
        # where it has. Guarded by the lock.
        self._asked: dict[int, int] = {}
        self._questions = itertools.count(1)
        self._next_look = 0.0
        self._pid = os.getpid()
        agent.dispatcher.register(Kind.SEGMENT, self._on_segment)
        agent.dispatcher.register_extension(SHARED, self._borrow)
        agent.dispatcher.register_extension(RETURNED, self._on_returned)
        agent.outbox.carry = self.carry
        agent.outbox.uncarry = self.uncarry
        agent.outbox.to_return = self.loans.ended
        agent.flushers.append(self._flush)
        agent.tickers.append(self._tick)
        self._all[id(self)] = self

    # -- sending -------------------------------------------------------------------------

    def carry(self, rank: int, message: Message) -> None:
        """Moves the large buffers of a message into a segment, where that can be done.

        With it go the segments that this worker returns to that one: with an answer, say, those
        of the arguments. So the next call finds them free, and their memory still cached.
        """
        if self.loans.ended:
            self._return_with(rank, message)
        if message.buffers:
            self._carry_buffers(rank, message)

    def uncarry(self, rank: int, message: Message) -> None:
        """A message can't be sent: what went into a segment, and the word of those returned.

        A part of it may have left, by which the peer takes the segment for its own, until it finds
        that the message is none: so that segment is not used again. By that part the peer may also
        have heard of those that are returned, and have lent them to us again: were it told once
        more, it would use them while we read. So it is told not to use them again.
        """
        for tag, data in message.extensions:
            if tag == SHARED:
                with self._lock:
                    self.pool.give_up(_NUMBER.unpack_from(data)[0], rank)
            elif tag == RETURNED:
                kept = [(_Verb.KEEP, number) for (number,) in _NUMBER.iter_unpack(data)]
                with self._lock:
                    self._to_return.setdefault(rank, []).extend(kept)

    def _return_with(self, rank: int, message: Message) -> None:
        with self._lock:
            self._sort_ended()
            notes = self._to_return.get(rank, [])
            returned = [number for verb, number in notes if verb is _Verb.RETURN]
            if returned:  # the others are for `_flush`
                self._to_return[rank] = [note for note in notes if note[0] is _Verb.KEEP]
        if returned:
            data = b"".join(map(_NUMBER.pack, returned))
            message.extensions = [*message.extensions, (RETURNED, data)]

    def _sort_ended(self) -> None:
        """Sorts loans that have ended by their owner; the lock is held."""
        for loan in self.loans.returned():
            verb = _Verb.KEEP if loan.keep else _Verb.RETURN
            self._to_return.setdefault(loan.owner, []).append((verb, loan.number))

    def _carry_buffers(self, rank: int, message: Message) -> None:
        windows = [(i, w) for i, b in enumerate(message.buffers) if (w := _window(b)) is not None]
        sizes = [ctypes.sizeof(window) for _, window in windows]
        if sum(sizes) < LEAST_BYTES or not self.agent.membership.reaches_by_ipc(rank):
            return
        if rank not in self._accepted:
            self._offer(rank)
            return
        lent = self._lend(sizes, rank)
        if lent is None:
            return
        segment, offsets = lent
        places = []
        descriptor = self._descriptor(segment)
        try:
            for (index, window), offset, size in zip(windows, offsets, sizes, strict=True):
                segment.write(offset, window)
                places.append(_PLACE.pack(index, offset, size))
        except BaseException:
            with self._lock:
                self.pool.give_up(segment.number, rank)
            raise
        finally:
            with self._lock:
                there = self.pool.written(segment)
        if not there:
            return  # the peer was lost, or we close
        moved = {index for index, _ in windows}
        message.buffers = [b for i, b in enumerate(message.buffers) if i not in moved]
        data = _DESCRIPTOR.pack(*descriptor) + b"".join(places)
        message.extensions = [*message.extensions, (SHARED, data)]

    def _lend(self, sizes: list[int], rank: int) -> tuple[Segment, list[int]] | None:
        """As `SegmentPool.lend`; but nothing to a peer that is lost, who would keep it."""
        with self._lock:
            # Under the lock: `lose`, for which it is marked first, takes back what is lent before.
            if rank in self.agent.membership.lost:
                return None
            self._asked.pop(rank, None)
            return self.pool.lend(sizes, rank)

    def _offer(self, rank: int) -> None:
        """Asks a peer, once, whether it can open segments of ours."""
        if rank in self._offered or rank == self.agent.membership.rank:
            return
        self._offered.add(rank)
        lent = self._lend([LEAST_BYTES], rank)
        if lent is None:
            self._offered.discard(rank)
            return
        segment, _ = lent
        with self._lock:
            self.pool.written(segment)
        body = _NOTE.pack(_Verb.OFFER, segment.number)
        self._post(rank, body + _DESCRIPTOR.pack(*self._descriptor(segment)))

    def _descriptor(self, segment: Segment) -> Descriptor:
        return Descriptor(segment.number, self._pid, segment.fd, segment.inode, segment.size)

    # -- in the I/O thread ---------------------------------------------------------------

    def _borrow(self, message: Message, data: bytes) -> Loan:
        """Puts the buffers that came by shared memory into a message."""
        if len(data) < _DESCRIPTOR.size:
            raise ProtocolError(f"expected the descriptor of a segment, found {len(data)} bytes")
        descriptor = Descriptor(*_DESCRIPTOR.unpack_from(data))
        rows = list(_PLACE.iter_unpack(data[_DESCRIPTOR.size :]))
        count = len(message.buffers) + len(rows)
        indices = {index for index, _, _ in rows if index < count}
        if len(indices) != len(rows) or not rows:
            raise ProtocolError(f"expected places of {count} buffers, found {rows}")
        if any(offset + size > descriptor.size for _, offset, size in rows):
            raise ProtocolError("a message names places outside of its segment")
        places = [(offset, size) for _, offset, size in rows]
        try:
            loan = self.loans.borrow(message.sender, descriptor, places)
        except (OSError, ValueError):
            # Out of descriptors, say. The sender may use the segment again.
            self._post(message.sender, _NOTE.pack(_Verb.RETURN, descriptor.number))
            raise
        views, loan.views = loan.views, None
        by_index: dict[int, Any] = dict(zip((i for i, _, _ in rows), views or (), strict=True))
        others = iter(message.buffers)
        message.buffers = [by_index[i] if i in by_index else next(others) for i in range(count)]
        return loan

    def _on_returned(self, message: Message, data: bytes) -> None:
        """Takes back the segments that a message came with."""
        with self._lock:
            for (number,) in _NUMBER.iter_unpack(data):
                self.pool.give_back(number, message.sender)

    def _on_segment(self, message: Message) -> None:
        body = bytes(message.body)
        if len(body) < _NOTE.size:
            raise ProtocolError(f"expected a word about a segment, found {len(body)} bytes")
        verb, number = _NOTE.unpack_from(body)
        rank = message.sender
        if verb == _Verb.OFFER:
            if self.loans.probe(Descriptor(*_DESCRIPTOR.unpack_from(body, _NOTE.size))):
                self._post(rank, _NOTE.pack(_Verb.ACCEPT, number))
            self._post(rank, _NOTE.pack(_Verb.RETURN, number))
        elif verb == _Verb.ACCEPT:
            self._accepted.add(rank)
        elif verb == _Verb.CLOSED:
            self.loans.forget(rank, number)
        elif verb == _Verb.ASK:
            self._post(rank, _NOTE.pack(_Verb.OPEN, number))  # all that came before, it has
        elif verb == _Verb.OPEN:
            with self._lock:
                if self._asked.get(rank) == number:
                    self._asked[rank] = 0
        elif verb in (_Verb.RETURN, _Verb.KEEP):
            with self._lock:
                end = self.pool.give_back if verb == _Verb.RETURN else self.pool.give_up
                end(number, rank)
        else:
            raise ProtocolError(f"expected a known word about a segment, found {verb}")

    def _flush(self) -> None:
        """Gives back what is not used any more, and tells of what was closed."""
        if self.loans.ended or self._to_return:
            with self._lock:
                self._sort_ended()
                ended, self._to_return = self._to_return, {}
            for owner, notes in ended.items():
                for note in notes:
                    self._post(owner, _NOTE.pack(*note))
        if self.pool.retired:
            with self._lock:
                retired, self.pool.retired = self.pool.retired, []
            for segment in retired:
                for rank in segment.known_to:
                    self._post(rank, _NOTE.pack(_Verb.CLOSED, segment.number))

    def _tick(self) -> None:
        """Closes what has not been used for long."""
        now = time.monotonic()
        if now >= self._next_look and len(self.pool):
            self._next_look = now + 1.0
            with self._lock:
                self.pool.shrink(now)

    def lose(self, rank: int) -> None:
        """A peer is gone: what it had is not used again, and its own segments go."""
        self._accepted.discard(rank)
        with self._lock:
            self.pool.lose(rank)
            self._to_return.pop(rank, None)
            self._asked.pop(rank, None)
        self.loans.forget(rank)

    def quiet(self) -> bool:
        """Whether all have opened what they are lent; it may stay lent over a shutdown, and goes
        with those who use it.

        What they have not opened goes with this worker, and with it the message that it belongs to.
        """
        with self._lock:
            borrowers = self.pool.borrowers - self.agent.membership.lost
            to_ask = {rank: next(self._questions) for rank in borrowers - self._asked.keys()}
            self._asked.update(to_ask)
            opened = not any(self._asked[rank] for rank in borrowers)
        for rank, number in to_ask.items():
            self._post(rank, _NOTE.pack(_Verb.ASK, number))
        return opened

    def close(self) -> None:
        """Closes all segments; tensors that are views of a peer's stay good."""
        self.agent.outbox.carry = self.agent.outbox.uncarry = None
        with self._lock:
            self.pool.close()
        self.loans.close()

    def _post(self, rank: int, body: bytes) -> None:
        # Not counted: it may go on while a shutdown looks for the last message.
        self.agent.outbox.post(rank, Message(Kind.SEGMENT, body=body), counted=False)

    @classmethod
    def _before_fork(cls) -> None:
        with contextlib.ExitStack() as each:  # all of them, also where one fails
            for layer in [ref() for ref in cls._all.valuerefs()]:
                if layer is not None:
                    each.callback(layer.loans.keep_all)


def _window(buffer: Any) -> Any:
    """The buffer as a ctypes array, where its address can be had."""
    if isinstance(buffer, memoryview) and not buffer.readonly:
        return (ctypes.c_char * buffer.nbytes).from_buffer(buffer)
    return buffer if isinstance(buffer, ctypes.Array) else None


def plug_in(agent: Agent) -> SharedMemoryLayer:
    """Plugs shared memory into an agent, see `join_mesh`; with no capacity it carries nothing."""
    capacity = agent.shared_memory if supports_segments() else 0
    return SharedMemoryLayer(agent, capacity)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=SharedMemoryLayer._before_fork)

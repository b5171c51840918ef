"""Sends large tensors between workers of one host by shared memory instead of frames.

The sender copies the large buffers of a message into a segment of its own, and the message says
where. The receiver maps the segment, and its tensors are views of it. When they are freed it
returns the segment, to be used again: with the next message to the sender, often the answer, or
else by a message of its own. So there is one copy in and none out.

The first time that there is something large for a peer, it is asked whether it can open a segment
(OFFER, answered by ACCEPT, or only by the RETURN of that segment). It asks the same back, so the
answer finds the way open. The thread that sends waits for the peer's reply, but no longer than the
way by frames would take. If there is none, if the peer can't, and if the pool is full, frames are
used.
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
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any, ClassVar

from typing_extensions import override

from zrpc.agent.agent import Agent
from zrpc.agent.service import ExtensionReader, Handler, Service
from zrpc.calls.message_hooks import MessageHooks
from zrpc.errors import ProtocolError
from zrpc.runtime.interrupts import UninterruptedLock
from zrpc.runtime.thread_pool import pass_gate
from zrpc.services.shm.borrowed import Descriptor, Loan, Loans
from zrpc.services.shm.segments import Segment, SegmentPool, array_of, supports_segments
from zrpc.wire.kind import Kind, Tag
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message

__all__ = ["SharedMemoryService", "SharedMemoryTiming"]

# Messages whose large buffers are smaller than this in all go by frames: finding and returning a
# segment costs more than copying the bytes through a socket. Measured, there and back: 128 KiB take
# 150 us by a segment and 120 us by a direct connection, 250 KiB the same by both.
LEAST_BYTES = 1 << 18

_DESCRIPTOR = struct.Struct("<QIIQQ")  # number, pid, fd, inode, size
_PLACE = struct.Struct("<IQQ")  # index of the buffer, offset, size
_NOTE = struct.Struct("<BQ")  # verb, number of the segment
_NUMBER = struct.Struct("<Q")  # number of a segment
_WAY = struct.Struct("<BB")  # the connection that an ASK takes, and how many there are


class _Verb(IntEnum):
    """What a message about segments says."""

    OFFER = 1  # can you open this segment? (with a descriptor)
    ACCEPT = 2  # I can
    RETURN = 3  # use this segment again
    KEEP = 4  # never use this segment again, I may read it without limit
    CLOSED = 5  # this segment is not lent again
    ASK = 6  # have you opened what I have lent you? (with the number of the question, by each way)
    OPEN = 7  # I have (with the number of that question)


@dataclass(frozen=True, slots=True)
class SharedMemoryTiming:
    """When segments are closed, and how long a peer is waited for, in seconds.

    Attributes:
        idle_seconds: how long a free segment is kept for the next message.
        check_seconds: how often the pool is checked for idle segments.
        offer_seconds_per_byte: how long a message waits for the reply to the first offer, for each
            byte that it could send by shared memory. The default is what frames cost more.
    """

    idle_seconds: float = 10.0
    check_seconds: float = 1.0
    offer_seconds_per_byte: float = 1.5e-9


class SharedMemoryService(Service, MessageHooks):
    """Carries large buffers to and from the workers of the same host.

    Attributes:
        pool: this worker's segments.
        loans: the segments that peers have lent to this worker.
        timing: when segments are closed; it may be replaced at any time.
        sent_bytes, received_bytes: the size of all buffers that went and came by shared memory.
    """

    # The services of this process, for fork, by identity. Not a set: another thread may add one
    # while a fork iterates over them, and only `valuerefs` tolerates that.
    _all: ClassVar[weakref.WeakValueDictionary[int, SharedMemoryService]] = (
        weakref.WeakValueDictionary()
    )

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self.timing = SharedMemoryTiming()
        # Guards the pool and what has been borrowed, which any thread that sends uses.
        self._lock = UninterruptedLock()
        # Without capacity it carries nothing.
        self.pool = SegmentPool(agent.options.shared_memory if supports_segments() else 0)
        self.loans = Loans()
        # What to tell the owners of loans that have ended: RETURN or KEEP, and which segment.
        self._to_return: dict[MemberId, list[tuple[_Verb, int]]] = {}
        self._accepted: set[MemberId] = set()
        self._offered: set[MemberId] = set()
        # For each peer whose reply to the offer is awaited: the gates of the threads that wait.
        # Guarded by the lock.
        self._awaited: dict[MemberId, list[threading.Lock]] = {}
        # For each borrower that was asked whether it has opened what it was lent last: the number
        # of the question, or 0 if it has. Guarded by the lock.
        self._asked: dict[MemberId, int] = {}
        self._questions = itertools.count(1)
        # The latest question of each owner, and the connections that brought it. In the I/O thread.
        self._asking: dict[MemberId, tuple[int, set[int]]] = {}
        self._next_check = 0.0
        self.sent_bytes = self.received_bytes = 0
        self._pid = os.getpid()
        self.to_carry = self.loans.ended
        self._closed = False
        self._all[id(self)] = self

    @override
    def handlers(self) -> Mapping[Kind, Handler]:
        return {Kind.SEGMENT: self._on_segment}

    @override
    def extension_readers(self) -> Mapping[Tag, ExtensionReader]:
        return {Tag.SHARED: self._borrow, Tag.RETURNED: self._on_returned}

    @override
    def message_hooks(self) -> MessageHooks:
        return self

    # -- sending -------------------------------------------------------------------------

    @override
    def carry(self, member: MemberId, message: Message) -> None:
        """Moves the large buffers of a message into a segment, if possible.

        The message also returns segments to that worker: an answer returns those of the arguments,
        for example. So the next call finds them free, and their memory still cached.
        """
        if self._closed:
            return
        if self.loans.ended:
            self._return_with(member, message)
        if message.buffers:
            self._carry_buffers(member, message)

    @override
    def undo_carry(self, member: MemberId, message: Message) -> None:
        """Retires the segments that a message carries or returns, since it can't be sent.

        A part of it may have been sent. Then the peer uses the segment until it finds the message
        incomplete: so that segment is not used again. That part may also have
        returned segments, and the peer may have lent them to us again: if they were returned once
        more, it would use them while we read. So it is told not to use them again.
        """
        if self._closed:
            return
        for tag, data in message.extensions:
            if tag == Tag.SHARED:
                with self._lock:
                    self.pool.retire(_NUMBER.unpack_from(data)[0], member)
            elif tag == Tag.RETURNED:
                kept = [(_Verb.KEEP, number) for (number,) in _NUMBER.iter_unpack(data)]
                with self._lock:
                    self._to_return.setdefault(member, []).extend(kept)

    def _return_with(self, member: MemberId, message: Message) -> None:
        with self._lock:
            self._sort_ended()
            notes = self._to_return.get(member, [])
            returned = [number for verb, number in notes if verb is _Verb.RETURN]
            if returned:  # `_send_notes` sends the others
                self._to_return[member] = [note for note in notes if note[0] is _Verb.KEEP]
        if returned:
            data = b"".join(map(_NUMBER.pack, returned))
            message.extensions = [*message.extensions, (Tag.RETURNED, data)]

    def _sort_ended(self) -> None:
        """Sorts loans that have ended by their owner. The lock is held."""
        for loan in self.loans.returned():
            verb = _Verb.KEEP if loan.keep else _Verb.RETURN
            self._to_return.setdefault(loan.owner, []).append((verb, loan.number))

    def _carry_buffers(self, member: MemberId, message: Message) -> None:
        arrays = [(i, a) for i, b in enumerate(message.buffers) if (a := array_of(b)) is not None]
        sizes = [ctypes.sizeof(array) for _, array in arrays]
        if sum(sizes) < LEAST_BYTES or not self.agent.membership.reaches_by_ipc(member):
            return
        if member not in self._accepted:
            self._offer(member)
            if not self._await_reply(member, sum(sizes), message.deadline):
                return
        lent = self._lend(sizes, member)
        if lent is None:
            return
        segment, offsets = lent
        places = []
        descriptor = self._descriptor(segment)
        try:
            for (index, array), offset, size in zip(arrays, offsets, sizes, strict=True):
                segment.write(offset, array)
                places.append(_PLACE.pack(index, offset, size))
        except BaseException as error:
            with self._lock:
                self.pool.retire(segment.number, member)
            if not isinstance(error, OSError):  # frames may find the memory that a segment lacks
                raise
        finally:
            with self._lock:
                there = self.pool.written(segment)
                self.sent_bytes += sum(sizes) if there else 0
        if not there:
            return  # there was no memory, the peer was lost, or this service is closed
        moved = {index for index, _ in arrays}
        message.buffers = [b for i, b in enumerate(message.buffers) if i not in moved]
        data = _DESCRIPTOR.pack(*descriptor) + b"".join(places)
        message.extensions = [*message.extensions, (Tag.SHARED, data)]

    def _lend(self, sizes: list[int], member: MemberId) -> tuple[Segment, list[int]] | None:
        """Lends a segment, see `SegmentPool.lend`, unless the peer is lost: it would keep it."""
        with self._lock:
            # Under the lock: a peer is marked as lost before `on_member_lost` takes back
            # what it was lent.
            if member in self.agent.membership.lost:
                return None
            self._asked.pop(member, None)
            return self.pool.lend(sizes, member)

    def _offer(self, member: MemberId) -> None:
        """Asks a peer, once, whether it can open segments of ours."""
        if member == self.agent.membership.own_id:
            return
        with self._lock:
            if member in self._offered:
                return
            # From now on, all threads that send to this peer wait for its reply.
            self._offered.add(member)
            self._awaited[member] = []
        lent = self._lend([LEAST_BYTES], member)
        with self._lock:
            if lent is None:
                self._offered.discard(member)
                self._end_wait(member)
                return
            segment, _ = lent
            self.pool.written(segment)
        body = _NOTE.pack(_Verb.OFFER, segment.number)
        self._post(member, body + _DESCRIPTOR.pack(*self._descriptor(segment)))

    def _await_reply(self, member: MemberId, size: int, deadline: float) -> bool:
        """Waits for a peer's reply to the offer, if one is due; returns whether it has accepted.

        Args:
            member: the peer.
            size: how many bytes the message could send by shared memory.
            deadline: the message's; 0 if it has none.
        """
        if self.agent.receiver.receives_now():
            return False  # the reply can't arrive while this thread waits
        gate = threading.Lock()
        gate.acquire()
        with self._lock:
            if member not in self._awaited:
                return member in self._accepted
            self._awaited[member].append(gate)
        seconds = size * self.timing.offer_seconds_per_byte
        # Ended by the reply, by the loss of the peer, or by the close of this service.
        pass_gate(gate, min(seconds, deadline) if deadline else seconds)
        return member in self._accepted

    def _end_wait(self, member: MemberId) -> None:
        """Wakes the threads that wait for a peer's reply; the lock is held."""
        for gate in self._awaited.pop(member, ()):
            gate.release()

    def _descriptor(self, segment: Segment) -> Descriptor:
        return Descriptor(segment.number, self._pid, segment.fd, segment.inode, segment.size)

    # -- in the I/O thread ---------------------------------------------------------------

    def _borrow(self, message: Message, data: bytes) -> Loan:
        """Puts the buffers that came by shared memory into their message."""
        if len(data) < _DESCRIPTOR.size:
            raise ProtocolError(f"expected the descriptor of a segment, found {len(data)} bytes")
        descriptor = Descriptor(*_DESCRIPTOR.unpack_from(data))
        rows = list(_PLACE.iter_unpack(data[_DESCRIPTOR.size :]))
        count = len(message.buffers) + len(rows)
        indices = {index for index, _, _ in rows if index < count}
        if len(indices) != len(rows) or not rows:
            raise ProtocolError(f"expected places of {count} buffers, found {rows}")
        if any(offset + size > descriptor.size for _, offset, size in rows):
            raise ProtocolError(f"expected places within {descriptor.size} bytes, found {rows}")
        places = [(offset, size) for _, offset, size in rows]
        try:
            loan = self.loans.borrow(message.sender, descriptor, places)
        except (OSError, ValueError):
            # Out of descriptors, for example. The sender may use the segment again.
            self._post(message.sender, _NOTE.pack(_Verb.RETURN, descriptor.number))
            raise
        views, loan.views = loan.views, None
        by_index: dict[int, Any] = dict(zip((i for i, _, _ in rows), views or (), strict=True))
        others = iter(message.buffers)
        message.buffers = [by_index[i] if i in by_index else next(others) for i in range(count)]
        self.received_bytes += sum(size for _, size in places)
        return loan

    def _on_returned(self, message: Message, data: bytes) -> None:
        """Takes back the segments that a message returns."""
        with self._lock:
            for (number,) in _NUMBER.iter_unpack(data):
                self.pool.give_back(number, message.sender)

    def _on_segment(self, message: Message) -> None:
        body = bytes(message.body)
        if len(body) < _NOTE.size:
            raise ProtocolError(f"expected a message about a segment, found {len(body)} bytes")
        verb, number = _NOTE.unpack_from(body)
        member = message.sender
        if verb == _Verb.OFFER:
            if self.loans.probe(Descriptor(*_DESCRIPTOR.unpack_from(body, _NOTE.size))):
                self._post(member, _NOTE.pack(_Verb.ACCEPT, number))
            self._post(member, _NOTE.pack(_Verb.RETURN, number))
            self._offer(member)
        elif verb == _Verb.ACCEPT:
            self._accepted.add(member)
            with self._lock:
                self._end_wait(member)
        elif verb == _Verb.CLOSED:
            self.loans.forget(member, number)
        elif verb == _Verb.ASK:
            way, ways = _WAY.unpack_from(body, _NOTE.size)
            latest, seen = self._asking.get(member, (0, set()))
            if number > latest:
                latest, seen = self._asking[member] = number, set()
            if number == latest:
                seen.add(way)
                if len(seen) == ways:  # all that came before is open
                    self._post(member, _NOTE.pack(_Verb.OPEN, number))
        elif verb == _Verb.OPEN:
            with self._lock:
                if self._asked.get(member) == number:
                    self._asked[member] = 0
        elif verb in (_Verb.RETURN, _Verb.KEEP):
            with self._lock:
                end = self.pool.give_back if verb == _Verb.RETURN else self.pool.retire
                end(number, member)
                self._end_wait(member)  # it has replied, and not accepted
        else:
            raise ProtocolError(f"expected a known verb about a segment, found {verb}")

    @override
    def after_turn(self) -> Sequence[tuple[Sized, Callable[[], None]]]:
        containers = self.loans.ended, self._to_return, self.pool.retired
        return [(each, self._send_notes) for each in containers]

    def _send_notes(self) -> None:
        """Returns what is no longer used here, and says which segments are used no more."""
        with self._lock:
            self._sort_ended()
            due = [(owner, note) for owner, notes in self._to_return.items() for note in notes]
            for segment in self.pool.retired:
                due += [(member, (_Verb.CLOSED, segment.number)) for member in segment.known_to]
            self._to_return.clear()
            self.pool.retired.clear()
        for member, note in due:
            self._post(member, _NOTE.pack(*note))

    @override
    def tick(self) -> None:
        now = time.monotonic()
        if now >= self._next_check and len(self.pool):
            self._next_check = now + self.timing.check_seconds
            with self._lock:
                self.pool.close_idle(now - self.timing.idle_seconds)

    @override
    def on_member_lost(self, member: MemberId) -> None:
        self._accepted.discard(member)
        with self._lock:
            self.pool.retire_lent_to(member)
            self._to_return.pop(member, None)
            self._asked.pop(member, None)
            self._end_wait(member)
        self._asking.pop(member, None)
        self.loans.forget(member)

    @override
    def stats(self) -> Mapping[str, int]:
        return {"shm_bytes_sent": self.sent_bytes, "shm_bytes_received": self.received_bytes}

    @override
    def idle(self) -> bool:
        """Returns whether all borrowers have opened what they were lent.

        Opened segments may stay lent after a shutdown, and are freed with their users. A segment
        that is not opened is freed when this worker exits, and its message would be lost.
        """
        with self._lock:
            borrowers = self.pool.borrowers - self.agent.membership.lost
            to_ask = {member: next(self._questions) for member in borrowers - self._asked.keys()}
            self._asked.update(to_ask)
            opened = not any(self._asked[member] for member in borrowers)
        for member, number in to_ask.items():
            # Not here: another thread may be copying a large message into the mailbox.
            self.agent.completions.submit(partial(self._ask, member, number))
        return opened

    def _ask(self, member: MemberId, number: int) -> None:
        def first_frame(way: int, ways: int, _: int) -> bytes:
            body = _NOTE.pack(_Verb.ASK, number) + _WAY.pack(way, ways)
            return Message(Kind.SEGMENT, body=body).first_frame()

        self.agent.outbox.post_each_way(member, first_frame)

    @override
    def close(self) -> None:
        self._closed = True
        with self._lock:
            self.pool.close()
            for member in list(self._awaited):
                self._end_wait(member)
        self.loans.close()

    def _post(self, member: MemberId, body: bytes) -> None:
        # Not counted: these may still be sent while a shutdown waits for the last message.
        self.agent.outbox.post(member, Message(Kind.SEGMENT, body=body))

    @classmethod
    def _before_fork(cls) -> None:
        with contextlib.ExitStack() as each:  # all of them, even if one fails
            for service in [ref() for ref in cls._all.valuerefs()]:
                if service is not None:
                    each.callback(service.loans.keep_all)


os.register_at_fork(before=SharedMemoryService._before_fork)

"""Sends large tensors between workers of one host by shared memory instead of frames.

The sender copies the large buffers of a message into a segment of its own, and the message says
where. The receiver maps the segment, and its tensors are views of it. When they are freed it
returns the segment, to be used again: with the next message to the sender, often the answer, or
else by a message of its own. Either message may be lost, so the sender asks now and then whether
the receiver still has the segment. So there is one copy in and none out. What the sender holds in a
segment is not even copied in, however many peers it is sent to. Tensors on devices are copied from
there into a segment at once.

A segment is a memfd. Its descriptor goes to each peer once, ahead of the first message that names
it. If the peer has no room for it, and if the pool is full, frames are used. Of one that sends too
many descriptors, a worker closes the earliest. Messages of one call to a group share a segment.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any, ClassVar

from typing_extensions import override

from zrpc.agent.agent import Agent
from zrpc.agent.service import ExtensionReader, Handler, Service
from zrpc.calls.message_hooks import MessageHooks
from zrpc.errors import ProtocolError, RpcError, has_shut_down
from zrpc.runtime.interrupts import UninterruptedLock, uninterrupted
from zrpc.services.shm.borrowed import Loans
from zrpc.services.shm.segments import (
    MAX_SEGMENTS,
    NOTE,
    Place,
    Segment,
    SegmentPool,
    Share,
    Verb,
    aligned,
    read_records,
    record,
)
from zrpc.wire.kind import Kind, Tag
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message
from zrpc.wire.page_locks import page_locks
from zrpc.wire.pickling import Encoder

# Messages whose large buffers are smaller than this in all go by frames: finding and returning a
# segment costs more than copying the bytes through a socket. Measured, there and back: 128 KiB take
# 150 us by a segment and 120 us by a direct connection, 250 KiB the same by both.
LEAST_BYTES = 1 << 18
_UNLOCK_SECONDS = 2.0  # how long closing waits for a device that still has work


class SharedMemoryService(Service, MessageHooks):
    """Carries large buffers to and from the workers of the same host.

    Attributes:
        pool: this worker's segments.
        loans: the segments that peers have lent to this worker.
        idle_seconds: how long a free segment is kept for the next message.
        check_seconds: how often borrowers are asked for what they have.
        sent_bytes, received_bytes: the size of all buffers that went and came by shared memory.
    """

    # The services of this process, for fork, by identity. Not a set: another thread may add one
    # while a fork iterates over them, and only `valuerefs` tolerates that.
    _all: ClassVar[weakref.WeakValueDictionary[int, SharedMemoryService]] = (
        weakref.WeakValueDictionary()
    )

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self.idle_seconds = self.check_seconds = 10.0
        # Guards the pool and what has been borrowed, which any thread that sends uses.
        self._lock = UninterruptedLock()
        # Without capacity it carries nothing.
        self.pool = SegmentPool(agent.options.shared_memory)
        self.loans = Loans()
        # The notes to send to each member. Guarded by the lock.
        self._notes: dict[MemberId, bytes] = {}
        self.sent_bytes = self.received_bytes = 0
        self.to_carry = self.loans.ended
        self._closed = False
        self._all[id(self)] = self

    @override
    def handlers(self) -> Mapping[Kind, Handler]:
        return {Kind.SEGMENT: lambda message: None}  # it has brought notes

    @override
    def extension_readers(self) -> Mapping[Tag, ExtensionReader]:
        return {
            Tag.SHARED: self._borrow,
            Tag.SEGMENTS: self._on_notes,
            Tag.COMMON: self._borrow_common,
        }

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
            with self._lock:
                self._note_ended()
                notes = self._notes.pop(member, b"")
            if notes:
                message.extensions = [*message.extensions, (Tag.SEGMENTS, notes)]
        if message.buffers:
            self._carry_buffers(member, message)

    @override
    def memory(self, member: MemberId, size: int) -> Any:
        """Returns memory in a segment for what is copied from devices, if that is possible."""
        if self._closed or size < LEAST_BYTES or not self.reaches(member):
            return None
        with contextlib.suppress(MemoryError, RpcError):
            return self.hold(size)
        return None

    @override
    def undo_carry(self, member: MemberId, message: Message) -> None:
        """Retires the segments that a message carries or returns, since it can't be sent.

        A part of it may have been sent. Then the peer uses the segment until it finds the message
        incomplete: so that segment is not used again. That part may also have returned segments,
        and the peer may have lent them to us again: if they were returned once more, it would use
        them while we read. So it is told not to use them again.
        """
        if self._closed:
            return
        with self._lock:
            for tag, data in message.extensions:
                if tag == Tag.SEGMENTS:
                    for verb, number in NOTE.iter_unpack(data):
                        verb = Verb.KEEP if verb == Verb.RETURN else verb
                        self._note(member, verb, number)
                elif tag in (Tag.SHARED, Tag.COMMON):
                    for number, _ in read_records(data):
                        self.pool.retire(number, member)

    def reaches(self, member: MemberId) -> bool:
        """Returns whether shared memory can be sent to a member: another worker of this host."""
        membership = self.agent.membership
        return member != membership.own_id and membership.reaches_by_ipc(member)

    def _note(self, member: MemberId, verb: int, number: int) -> None:
        """Adds a note for a member. The lock is held."""
        self._notes[member] = self._notes.get(member, b"") + NOTE.pack(verb, number)

    def _note_ended(self) -> None:
        """Adds notes about the loans that have ended. The lock is held."""
        for loan in self.loans.returned():
            self._note(loan.owner, Verb.KEEP if loan.keep else Verb.RETURN, loan.number)

    def _carry_buffers(self, member: MemberId, message: Message) -> None:
        sizes = [memoryview(buffer).nbytes for buffer in message.buffers]
        if sum(sizes) < LEAST_BYTES or not self.reaches(member):
            return
        with self._lock:
            lent, is_copy = self.pool.find(message.buffers, sizes), False
            if lent is None or not self._lend_again(lent[0], member):
                lent, is_copy = self.pool.lend(sizes, member), True
                if lent is None or not self._introduce(lent[0], member):
                    return  # there is no room, the peer is lost, or this service is closed
            self.sent_bytes += sum(sizes)
        segment, offsets = lent
        if is_copy:
            try:
                for buffer, offset in zip(message.buffers, offsets, strict=True):
                    segment.write(offset, buffer)
            except BaseException as error:
                with self._lock:
                    self.pool.retire(segment.number, member)
                if not isinstance(error, OSError):  # frames may find the memory that it lacks
                    raise
            finally:
                with self._lock:
                    there = self.pool.written(segment)
                    self.sent_bytes -= 0 if there else sum(sizes)
            if not there:
                return
        message.buffers = ()
        shared = Tag.SHARED, record(segment.number, offsets, sizes)
        message.extensions = [*message.extensions, shared]

    # -- one segment for several messages --------------------------------------------------

    def share(self, buffers: Sequence[Any]) -> Share | None:
        """Copies buffers to a segment that messages to several workers of this host may name.

        Returns None if they are small, or if there is no room.
        """
        sizes = [memoryview(buffer).nbytes for buffer in buffers]
        if self._closed or sum(sizes) < LEAST_BYTES:
            return None
        offsets, end = aligned(sizes)
        with uninterrupted, contextlib.suppress(MemoryError, OSError, RpcError):
            segment, memory = self._hold(end, shared=True)
            for buffer, offset in zip(buffers, offsets, strict=True):
                segment.write(offset, buffer)
            with self._lock:
                self.sent_bytes += sum(sizes)
            return Share(segment, record(segment.number, offsets, sizes), memory)
        return None

    def name_share(self, encoder: Encoder, share: Share) -> int | None:
        """Adds to a message where the buffers of a share are.

        Returns:
            The place of these buffers among those that the receiver finds by `Tag.COMMON`; None if
            the message can't name them, so that it must have the buffers itself.
        """
        member, number = encoder.destination, share.segment.number
        if not self.reaches(member):
            return None
        with self._lock:
            if self._closed or not self._lend_again(share.segment, member):
                return None
            encoder.undo(lambda: self._on_note(member, Verb.RETURN, number))
        extension = encoder.extension(Tag.COMMON)
        index = len(read_records(bytes(extension)))
        extension.extend(share.record)
        return index

    def _lend_again(self, segment: Segment, member: MemberId) -> bool:
        """Lends a segment that this worker holds, unless the peer can't have it; with the lock."""
        return self.pool.lend_held(segment, member) and self._introduce(segment, member)

    def _introduce(self, segment: Segment, member: MemberId) -> bool:
        """Sends a member the descriptor of a segment that was lent, once, ahead of the message.

        Takes the segment back, and returns False, if the member has no room or is lost. The lock is
        held: a peer is marked as lost before `on_member_lost` takes back what it was lent.
        """
        network, membership = self.agent.network, self.agent.membership
        there = member not in membership.lost
        if there and member not in segment.known_to:
            place = network.endpoint(member)
            try:
                network.descriptors.send(membership.own_id, place, segment.number, segment.fd)
                segment.known_to.add(member)
            except OSError:
                there = False
        if not there:
            self.pool.unused(segment, member)
        return there

    def hold(self, size: int) -> Any:
        """Returns a buffer in a segment, for what is sent to many peers, or again and again.

        A message whose large buffers all lie in it takes them to a peer on this host without a
        copy. It must not be changed once it was sent. When it is freed, and the peers have freed
        what they got, the segment is used again. Any thread may call this.

        Args:
            size: the number of bytes. It must be positive.

        Raises:
            MemoryError: there is not so much shared memory left.
            NotInitializedError: this worker has shut down.
        """
        return self._hold(size, shared=False)[1]

    def _hold(self, size: int, shared: bool) -> tuple[Segment, Any]:
        with self._lock, _expecting_memory(size):
            self.pool.release_ended()
            segment = self.pool.hold(size)
        if segment is None:
            if self._closed:
                raise has_shut_down()
            found = (
                f"{self.pool.size:,} bytes in use of {self.agent.options.shared_memory:,}: the "
                "option shared_memory sets that limit"
            )
            if len(self.pool) >= MAX_SEGMENTS:
                found = (
                    f"{MAX_SEGMENTS} segments in use, which is the maximum: keep copies of what "
                    "is received (`tensor.clone()`)"
                )
            raise MemoryError(f"expected room for {size:,} bytes of shared memory, found {found}")
        buffer = None
        try:
            with _expecting_memory(size):
                buffer = segment.hold(size)
        finally:
            with self._lock:
                there = self.pool.written(segment)
                if buffer is None:
                    self.pool.drop(segment)
                else:
                    self.pool.hold_until_freed(segment, buffer, shared)
        if not there:
            raise has_shut_down()
        return segment, buffer

    # -- in the I/O thread ---------------------------------------------------------------

    def _borrow(self, message: Message, data: bytes) -> None:
        """Puts the buffers that came by shared memory into their message."""
        ((number, places),) = read_records(data)
        message.buffers = self._borrow_from(message.sender, number, places)

    def _borrow_common(self, message: Message, data: bytes) -> list[list[Any]]:
        """Returns the buffers of each shared segment that a message names."""
        return [
            self._borrow_from(message.sender, number, places, private=True)
            for number, places in read_records(data)
        ]

    def _borrow_from(
        self, owner: MemberId, number: int, places: list[Place], private: bool = False
    ) -> list[Any]:
        if not places:
            raise ProtocolError("expected the places of buffers in shared memory, found none")
        if not self.loans.knows(owner, number):
            self._receive_descriptors()
        try:
            buffers = self.loans.borrow(owner, number, places, private)
        except (OSError, ValueError, ProtocolError):
            # Out of descriptors, for example. The sender must send the descriptor again.
            with self._lock:
                self._note(owner, Verb.KEEP, number)
            raise
        self.received_bytes += sum(size for _, size in places)
        return buffers

    def _receive_descriptors(self) -> None:
        """Keeps the descriptors that have come until messages name them."""
        network = self.agent.network
        with self._lock:
            for peer, number, fd in network.descriptors.receive(network.endpoint):
                owner = MemberId(peer)
                self.loans.add(owner, number, fd)
                if self._closed or owner in self.agent.membership.lost:
                    self.loans.forget(owner)

    def _on_notes(self, message: Message, data: bytes) -> None:
        for verb, number in NOTE.iter_unpack(data):
            self._on_note(message.sender, verb, number)

    def _on_note(self, member: MemberId, verb: int, number: int) -> None:
        if verb == Verb.CLOSED:
            self._receive_descriptors()  # it may be among them
            self.loans.forget(member, number)
        elif verb == Verb.CHECK:
            with self._lock:
                self._note_ended()
                if not self.loans.has(member, number):
                    self._note(member, Verb.KEEP, number)
        elif verb in (Verb.RETURN, Verb.KEEP):
            with self._lock:
                end = self.pool.give_back if verb == Verb.RETURN else self.pool.retire
                end(number, member)
        else:
            raise ProtocolError(f"expected a known verb about a segment, found {verb}")

    @override
    def after_turn(self) -> Sequence[tuple[Sized, Callable[[], None]]]:
        containers = self.loans.ended, self.pool.ended, self._notes, self.pool.retired
        return [(each, self.send_notes) for each in containers]

    def send_notes(self) -> None:
        """Returns what is no longer used here, and says which segments are used no more.

        That also happens by itself, soon. Any thread may call this.
        """
        with self._lock:
            self.pool.release_ended()
            self._note_ended()
            for segment in self.pool.retired:
                for member in segment.known_to:
                    self._note(member, Verb.CLOSED, segment.number)
            due = list(self._notes.items())
            self._notes.clear()
            self.pool.retired.clear()
        for member, notes in due:
            # Not counted: these may still be sent while a shutdown waits for the last message.
            self.agent.outbox.post(
                member, Message(Kind.SEGMENT, extensions=[(Tag.SEGMENTS, notes)])
            )

    @override
    def tick(self) -> None:
        self._receive_descriptors()  # those that no message names; else they would need all room
        page_locks.unlock_ended()
        if len(self.pool):
            now = time.monotonic()
            with self._lock:
                self.pool.close_idle(now - self.idle_seconds)
                unchecked = self.pool.unchecked(now - self.check_seconds)
            if unchecked and self._all_is_sent():
                self._check(unchecked)

    def _all_is_sent(self) -> bool:
        """Returns whether no message that may name a segment waits, for descriptors or for room."""
        calls = self.agent.caller.calls.in_flight()
        return not len(self.agent.outbox) and all(call.left for call in calls)

    def _check(self, segments: Sequence[Segment]) -> None:
        """Asks the borrowers of segments whether they still have them.

        The message that has lent one may be lost, or the one that has returned it.
        """
        with self._lock:
            for segment in segments:
                segment.checked = time.monotonic()
                for member in segment.borrowers:
                    self._note(member, Verb.CHECK, segment.number)

    @override
    def on_member_lost(self, member: MemberId) -> None:
        with self._lock:
            self.pool.retire_lent_to(member)
            self._notes.pop(member, None)
        self.loans.forget(member)

    @override
    def stats(self) -> Mapping[str, int]:
        return {"shm_bytes_sent": self.sent_bytes, "shm_bytes_received": self.received_bytes}

    @override
    def close(self) -> None:
        self._closed = True
        with self._lock:
            self.pool.close()
            self.loans.close()
        page_locks.unlock_ended(_UNLOCK_SECONDS)

    @classmethod
    def _before_fork(cls) -> None:
        with contextlib.ExitStack() as each:  # all of them, even if one fails
            for service in [ref() for ref in cls._all.valuerefs()]:
                if service is not None:
                    each.callback(service.loans.keep_all)

    @classmethod
    def _after_fork(cls) -> None:
        # Or the memory of segments that the parent closes would stay as long as the child lives.
        # What the child can read of them stays mapped.
        for service in [ref() for ref in cls._all.valuerefs()]:
            if service is not None:
                service._lock = UninterruptedLock()  # another thread may have held the parent's
                service.close()


@contextlib.contextmanager
def _expecting_memory(size: int) -> Iterator[None]:
    """Raises a MemoryError in place of the system's error."""
    try:
        yield
    except OSError as error:
        raise MemoryError(f"expected {size:,} bytes of shared memory, found {error}") from error


os.register_at_fork(
    before=SharedMemoryService._before_fork, after_in_child=SharedMemoryService._after_fork
)

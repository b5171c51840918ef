"""What a worker's groups need of its agent; and how parts are sent once to each other host.

The requests of several members on another host do not have a *part*, but name a *relay*, which is
one of these members. A member asks the relay for the part before it unpacks its request. At the
first such question the relay asks the caller; it puts the part into shared memory, and answers all.
If the relay is lost, or does not answer in time, the member asks the caller itself.

So requests, results, errors, deadlines and cancellation take the same way as in any other call, and
each request is sent once, whatever becomes of the relay. The questions are ordinary calls, of the
functions at the end of this module. When no member waits any longer, the caller tells the relays by
a message of the kind UNNEEDED.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import struct
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Sized
from functools import partial
from pickle import PickleBuffer
from typing import Any

from typing_extensions import override

from zrpc.agent.agent import Agent
from zrpc.agent.current import current_agent
from zrpc.agent.service import ExtensionReader, Handler, Service
from zrpc.calls.cancel_scope import activate, current_scope
from zrpc.calls.future import Future
from zrpc.calls.message_hooks import MessageHooks
from zrpc.errors import RpcCancelledError
from zrpc.functions import async_execution
from zrpc.runtime.gates import Gates
from zrpc.runtime.interrupts import UninterruptedLock
from zrpc.services.shm.segments import Share
from zrpc.services.shm.service import SharedMemoryService
from zrpc.wire.kind import Kind, Tag
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message
from zrpc.wire.pickling import encoder, register_reducer
from zrpc.wire.unpickling import Decoder, decoder

# What a request says of a part that its receiver asks another worker for, as bytes: the relay's
# member id, the number of the part among its caller's, and its size.
_TICKET = struct.Struct("<QQQ")
_NUMBER = struct.Struct("<Q")  # of a part among its caller's
# How long a member waits for the relay, which may stand still: a time, at most half of what is left
# for the call, and one for each byte.
_PATIENCE_SECONDS = 5.0
_PATIENCE_PER_BYTE = 1e-7


class Part:
    """An object that is packed once for several members. It arrives as its blocks.

    Args:
        service: this worker's.
        blocks: its pickle, its table and its buffers.
        holes: what is left out.
        placed: whether a device map says where its tensors arrive.

    Attributes:
        blocks, holes, placed: the same.
        nbytes: the size of all blocks.
        relays: the members of other hosts that ask another worker there for the blocks, and which.
    """

    def __init__(
        self,
        service: GroupService,
        blocks: Sequence[Any],
        holes: Sequence[Any] = (),
        placed: bool = False,
    ) -> None:
        self.blocks = blocks
        self.holes = holes
        self.placed = placed
        self.nbytes = sum(memoryview(block).nbytes for block in blocks)
        self.relays: dict[MemberId, MemberId] = {}
        self._service = service
        self._share: Share | None = None
        self._number = 0

    def lay(self) -> bool:
        """Copies the blocks to shared memory; returns False if they are small, or if it is full.

        From then on the part has nothing that its maker may change.
        """
        if self._share is None:
            self._share = self._service.shm.share(self.blocks)
            if self._share is not None:
                self.blocks = self._share.blocks()
        return self._share is not None

    def hand_on(self, member: MemberId, relay: MemberId) -> None:
        """Lets a member ask another one on its host for the blocks, if they are laid."""
        if self._share is not None:
            self._number = self._number or self._service.lend(self)
            self.relays[member] = relay

    def is_beside(self, member: MemberId) -> bool:
        """Returns whether the message to a member goes without the blocks, as far as is known."""
        near = self._service.shm.reaches(member)
        return self._share is not None and (near or member in self.relays)

    def _reduce(self) -> tuple[Any, ...]:
        message = encoder()
        assert message is not None
        if self._share is not None:
            place = self._service.shm.name_share(message, self._share)
            if place is not None:
                return _find, (Tag.COMMON, place)
            relay = self.relays.get(message.destination)
            lost = self._service.agent.membership.lost
            # A relay that asks gets the blocks in the answer.
            if relay is not None and relay not in lost and message.request is None:
                message.holds = [*message.holds, self]
                tickets = message.extension(Tag.RELAYED)
                place = len(tickets) // _TICKET.size
                tickets.extend(_TICKET.pack(relay, self._number, self.nbytes))
                return _find, (Tag.RELAYED, place)
        self._service.count(bytes_sent=self.nbytes)
        return list, ([*map(PickleBuffer, self.blocks)],)


def _find(tag: int, place: int) -> Sequence[Any]:
    """Returns blocks that have come with a message, and not inside of it."""
    found: Sequence[Any] = decoder().message.attachment(tag)[place]
    return found


register_reducer(Part, Part._reduce)


class GroupService(Service, MessageHooks):
    """Plugs groups into an agent.

    Attributes:
        shm: has what several members of this host read.
        gates: of the threads that wait for workers to join.
    """

    tag = Tag.RELAYED

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self.shm = agent.service(SharedMemoryService)
        self.gates = Gates()
        self._numbers = itertools.count(1)
        # The parts that calls in flight name, and who hands each on. The calls keep them; when the
        # last one is settled, any thread may append to the second. Single operations are atomic.
        self._lent: dict[int, tuple[weakref.KeyedRef[int, Part], dict[MemberId, MemberId]]] = {}
        self._ended: deque[weakref.KeyedRef[int, Part]] = deque()
        # Guards what follows; no other lock is taken while it is held.
        self._lock = UninterruptedLock()
        self._counts = {"group_bytes_packed": 0, "group_bytes_sent": 0}
        # What this worker hands on, by the caller and its number there.
        self._copies: dict[tuple[MemberId, int], Future[Part | None]] = {}

    @override
    def handlers(self) -> Mapping[Kind, Handler]:
        return {Kind.UNNEEDED: self._on_unneeded}

    @override
    def extension_readers(self) -> Mapping[Tag, ExtensionReader]:
        return {Tag.RELAYED: lambda _, data: list(_TICKET.iter_unpack(data))}

    @override
    def message_hooks(self) -> MessageHooks:
        return self

    def count(self, *, bytes_packed: int = 0, bytes_sent: int = 0) -> None:
        """Counts what was packed for several members, and what was sent of it."""
        with self._lock:
            self._counts["group_bytes_packed"] += bytes_packed
            self._counts["group_bytes_sent"] += bytes_sent

    # -- the caller --------------------------------------------------------------------------

    def lend(self, part: Part) -> int:
        """Numbers a part; members can ask for that number as long as the part lives."""
        number = next(self._numbers)
        self._lent[number] = weakref.KeyedRef(part, self._ended.append, number), part.relays
        return number

    def lent(self, number: int) -> Part | None:
        """Returns a part that was lent, for a worker that asks for it; None if it has ended."""
        ref, _ = self._lent.get(number, (None, {}))
        return None if ref is None else ref()

    @override
    def after_turn(self) -> Sequence[tuple[Sized, Callable[[], None]]]:
        return [(self._ended, self._tell_ended)]

    def _tell_ended(self) -> None:
        """Tells the relays of parts that no call needs any longer."""
        while self._ended:
            number = self._ended.popleft().key
            _, relays = self._lent.pop(number)
            for relay in set(relays.values()):
                self.agent.outbox.post(relay, Message(Kind.UNNEEDED, body=_NUMBER.pack(number)))

    # -- a member ----------------------------------------------------------------------------

    @override
    def open(self, decoder: Decoder) -> None:
        """Gets the parts of a request, in the thread that unpacks it."""
        message = decoder.message
        assert message.attachments is not None
        tickets = message.attachments[Tag.RELAYED]
        message.attachments[Tag.RELAYED] = [self._get(message.sender, *each) for each in tickets]

    def _get(self, caller: MemberId, relay: MemberId, number: int, nbytes: int) -> Sequence[Any]:
        # In the scope of the handler, but in none of its contexts: this is no part of a graph.
        scope, context = current_scope(), contextvars.Context()
        context.run(activate, scope)
        left = None if scope is None else scope.remaining()
        patience = _PATIENCE_SECONDS if left is None else min(_PATIENCE_SECONDS, left / 2)
        patience += nbytes * _PATIENCE_PER_BYTE
        blocks = None
        with contextlib.suppress(Exception):
            blocks = context.run(self._ask, relay, _handed_on, caller, number, timeout=patience)
        if blocks is None:
            blocks = context.run(self._ask, caller, _part, number)
        if blocks is None:
            raise RpcCancelledError(
                "expected a caller that waits for the answer, found that it no longer has the "
                "arguments: it has cancelled the call, or it has timed out"
            )
        return blocks

    def _ask(
        self, member: MemberId, function: Callable[..., Any], *args: Any, timeout: float = 0
    ) -> Sequence[Any] | None:
        """Asks for a part, by one of the functions below; returns its blocks."""
        info = self.agent.membership.infos[member]
        blocks: Sequence[Any] | None
        blocks = self.agent.caller.call(info, Kind.CALL, (function, args, {}), timeout)
        return blocks

    # -- a relay -----------------------------------------------------------------------------

    def copy(self, caller: MemberId, number: int) -> Future[Part | None]:
        """Returns a future of a part, which is sent here once; of None if it can't be had."""
        key = caller, number
        with self._lock:
            copy = self._copies.get(key)
            if copy is not None:
                return copy
            copy = Future()
            # Under the lock: a peer is marked as lost before `on_member_lost`, and so is the end.
            if not self.agent.closed and caller not in self.agent.membership.lost:
                self._copies[key] = copy
        self.agent.pool.submit(partial(self._fetch, key, copy))
        return copy

    def _fetch(self, key: tuple[MemberId, int], copy: Future[Part | None]) -> None:
        """Gets a part from its caller; that ends when it comes, or the caller is lost."""
        caller, number = key
        part = None
        with contextlib.suppress(Exception):  # the members ask the caller themselves
            blocks = self._ask(caller, _part, number)
            if blocks is not None:
                part = Part(self, blocks)
                part.lay()
        if part is None:
            self._drop([key])
        copy.set_result(part)

    def _drop(self, keys: Sequence[tuple[MemberId, int]]) -> None:
        with self._lock:
            dropped = [self._copies.pop(key, None) for key in keys]
        dropped.clear()  # without the lock: memory is freed

    def _on_unneeded(self, message: Message) -> None:
        self._drop([(message.sender, number) for (number,) in _NUMBER.iter_unpack(message.body)])

    @override
    def on_member_lost(self, member: MemberId) -> None:
        self._drop([key for key in list(self._copies) if key[0] == member])

    @override
    def on_messages_lost(self, member: MemberId) -> None:
        # One may have said that a part is not needed. One that is, is asked for again.
        self.on_member_lost(member)

    @override
    def close(self) -> None:
        self.gates.end()
        self._drop(list(self._copies))

    @override
    def stats(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self._counts)


# The functions that workers call on each other.


def _part(number: int) -> Part | None:
    return current_agent().service(GroupService).lent(number)


@async_execution
def _handed_on(caller: MemberId, number: int) -> Future[Part | None]:
    return current_agent().service(GroupService).copy(caller, number)

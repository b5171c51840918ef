"""The rules of the distributed reference count. No I/O: events in, messages out.

A value lives at its *owner*. Every other worker that knows it is a *user*; each handle of a
user is a *fork* with an id of its own. The owner lists all forks, and frees the value once
the list is empty and it has no handle itself. Two guarantees, as in torch's "Remote Reference
Protocol":

G1: the owner learns of every fork's end. (DELETE)

G2: a fork that handed on a child stays listed until the owner lists the child. So there is
always a listed fork while any fork lives, and the owner can't free too early.

A fork that is handed on (*child*) travels inside some message, by `References.fork`. Who
receives it there (`References.receive`) tells the owner (ADD), and the owner tells the
receiver and the parent (ADDED), which then no longer waits for it. An owner that hands on its
own handle lists the child before it sends; a child that arrives at the owner is told to its
parent at once.

============ ======================= ===================================================
message      from, to                meaning
============ ======================= ===================================================
ADD          user, owner             I hold this fork, which that parent gave me
ADDED        owner, user and parent  this fork is listed
DELETE       user, owner             this fork has ended
============ ======================= ===================================================

Messages may arrive in any order and more than once:

- Repeats are known by their serial number, counted for each pair of workers. What carries a
  fork (a call, an answer) has none. At its user a fork that comes again has one more handle, or
  none where it was among the last to end; an owner takes it for another one.
- A DELETE that comes before what lists its fork waits for it.
- A child names its parent. Where the owner hears of the child first, it knows that what lists
  the parent is still under way (by G2 the parent can't have ended), and frees nothing until
  then.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from zrpc.errors import ProtocolError
from zrpc.rref.ids import NO_FORK, ForkId, GloballyUniqueId, RRefId

__all__ = ["FORK_SIZE", "Fork", "ReferenceMessage", "References", "Verb"]

_LAYOUT = struct.Struct("<BQIQIQIIQ")
_FORK_LAYOUT = struct.Struct("<IQIQIIQ")
FORK_SIZE = _FORK_LAYOUT.size

# So many forks that have ended at a user are known again, should the message with them come twice.
_ENDED_REMEMBERED = 64

# A message may come after so many that were sent later: what was read from a connection before it
# broke comes after what came by the next.
_MOST_AHEAD = 1 << 14


class Verb(IntEnum):
    """What a message of the protocol says."""

    ADD = 1
    ADDED = 2
    DELETE = 3


class ReferenceMessage(NamedTuple):
    """One message of the protocol.

    Attributes:
        verb: what it says.
        serial: its number among those from its sender to its receiver, from 0.
        rref_id: of which value.
        fork_id: of which fork.
        parent: for ADD, the rank of the worker that handed the fork on.
        parent_id: for ADD, that worker's own fork.
    """

    verb: Verb
    serial: int
    rref_id: RRefId
    fork_id: ForkId
    parent: int = 0
    parent_id: ForkId = NO_FORK

    def pack(self) -> bytes:
        """The message as bytes."""
        ids = (*self.rref_id, *self.fork_id, self.parent, *self.parent_id)
        return _LAYOUT.pack(self.verb, self.serial, *ids)

    @classmethod
    def parse_all(cls, data: bytes | bytearray | memoryview) -> list[ReferenceMessage]:
        """The messages that were packed one after the other.

        Raises:
            ProtocolError: the bytes are none.
        """
        unique = GloballyUniqueId
        try:
            return [
                cls(Verb(verb), serial, unique(a, b), unique(c, d), parent, unique(e, f))
                for verb, serial, a, b, c, d, parent, e, f in _LAYOUT.iter_unpack(data)
            ]
        except (struct.error, ValueError) as error:
            raise ProtocolError(f"expected reference-count messages: {error}") from error


class Fork(NamedTuple):
    """What travels of a reference inside a message.

    Attributes:
        rref_id: of which value.
        fork_id: the child's.
        owner: the rank of the value's owner.
        parent_id: the sender's own fork; `NO_FORK` where the sender is the owner.
    """

    rref_id: RRefId
    fork_id: ForkId
    owner: int
    parent_id: ForkId = NO_FORK

    def pack(self) -> bytes:
        """The fork as bytes."""
        return _FORK_LAYOUT.pack(*self.rref_id, *self.fork_id, self.owner, *self.parent_id)

    @classmethod
    def unpack_all(cls, data: bytes) -> list[Fork]:
        """The forks that were packed one after the other.

        Raises:
            ProtocolError: the bytes are none.
        """
        try:
            rows = list(_FORK_LAYOUT.iter_unpack(data))
        except struct.error as error:
            raise ProtocolError(f"expected forks of {FORK_SIZE} bytes each: {error}") from error
        unique = GloballyUniqueId
        return [cls(unique(a, b), unique(c, d), e, unique(f, g)) for a, b, c, d, e, f, g in rows]


@dataclass(slots=True)
class _Owned:
    """What an owner knows of one of its values: the forks by holder, and its own handles."""

    forks: dict[ForkId, int] = field(default_factory=dict)
    handles: int = 0
    # Forks whose DELETE came first, by sender; what lists them is still on its way from there.
    ended_early: dict[ForkId, int] = field(default_factory=dict)
    # Forks that a child has named as its parent, with the parent's holder and the worker that
    # said so; what lists them is on its way too.
    announced: dict[ForkId, tuple[int, int]] = field(default_factory=dict)


@dataclass(slots=True)
class _Held:
    """What a user knows of one of its forks."""

    rref_id: RRefId
    owner: int
    handles: int = 1  # more where the message with the fork came twice
    listed: bool = False  # the owner has said so
    children: dict[ForkId, int] = field(default_factory=dict)  # unlisted, by receiver


class _Serials:
    """The serial numbers seen from one sender: all below ``next``, and those in ``ahead``.

    Of what is lost with a connection the numbers never come: after many others they count as seen.
    """

    __slots__ = ("ahead", "next")

    def __init__(self) -> None:
        self.next = 0
        self.ahead: set[int] = set()

    def admit(self, serial: int) -> bool:
        """Notes a number; False where it was noted before."""
        if serial < self.next or serial in self.ahead:
            return False
        self.ahead.add(serial)
        if len(self.ahead) > _MOST_AHEAD:
            self.next = min(self.ahead)
        while self.next in self.ahead:
            self.ahead.remove(self.next)
            self.next += 1
        return True


class References:
    """One worker's part in the reference count, as owner and as user.

    Messages to send gather in `outgoing`, values to free in `freed`; whoever drives this
    takes them from there after each event. For one thread at a time.

    Args:
        rank: this worker's.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._owned: dict[RRefId, _Owned] = {}
        self._held: dict[ForkId, _Held] = {}
        self._parents: dict[ForkId, ForkId] = {}  # unlisted children of ours, to our fork
        # Forks of ours that have ended, the latest: a message may come twice.
        self._ended: dict[ForkId, None] = {}
        self._adding: set[ForkId] = set()  # forks with an ADD that is not answered yet
        self._lost: set[int] = set()
        self._serials_out: dict[int, int] = {}
        self._serials_in: dict[int, _Serials] = {}
        self.outgoing: list[tuple[int, ReferenceMessage]] = []
        self.freed: list[RRefId] = []

    @property
    def quiet(self) -> bool:
        """Whether this worker waits for no message of the protocol, as user."""
        return not self._parents and not self._adding

    def __len__(self) -> int:
        """How many values are owned and forks held here."""
        return len(self._owned) + len(self._held)

    def holders(self, rref_id: RRefId) -> list[int]:
        """The ranks of the workers with a listed fork, with repeats; asked at the owner."""
        owned = self._owned.get(rref_id)
        return sorted(owned.forks.values()) if owned else []

    def listed(self, fork_id: ForkId) -> bool:
        """Whether the owner has confirmed this fork; asked at the user."""
        held = self._held.get(fork_id)
        return held is not None and held.listed

    # -- the owner -----------------------------------------------------------------------

    def hold(self, rref_id: RRefId) -> None:
        """The owner has one more handle."""
        self._entry(rref_id).handles += 1

    def release(self, rref_id: RRefId) -> None:
        """The owner has one handle less."""
        self._entry(rref_id).handles -= 1
        self._free_if_unused(rref_id)

    def add(self, rref_id: RRefId, fork_id: ForkId, holder: int) -> None:
        """The owner lists a fork: at its creation by ``remote``, or on ADD."""
        owned = self._entry(rref_id)
        owned.announced.pop(fork_id, None)
        if owned.ended_early.pop(fork_id, None) is None and holder not in self._lost:
            owned.forks[fork_id] = holder
        self._free_if_unused(rref_id)

    def _announce(self, rref_id: RRefId, parent_id: ForkId, holder: int, sender: int) -> None:
        """A child names its parent, which lives and is either listed or about to be."""
        owned = self._entry(rref_id)
        if parent_id not in owned.forks and holder not in self._lost:
            owned.announced[parent_id] = (holder, sender)

    def _delete(self, rref_id: RRefId, fork_id: ForkId, sender: int) -> None:
        owned = self._entry(rref_id)
        if owned.forks.pop(fork_id, None) is None:
            owned.ended_early[fork_id] = sender
        self._free_if_unused(rref_id)

    def _entry(self, rref_id: RRefId) -> _Owned:
        """The entry of a value, made where a message about it came before its creation."""
        owned = self._owned.get(rref_id)
        if owned is None:
            owned = self._owned[rref_id] = _Owned()
        return owned

    def _free_if_unused(self, rref_id: RRefId) -> None:
        owned = self._owned[rref_id]
        if not (owned.forks or owned.handles or owned.ended_early or owned.announced):
            del self._owned[rref_id]
            self.freed.append(rref_id)

    # -- the user ------------------------------------------------------------------------

    def create(self, rref_id: RRefId, fork_id: ForkId, owner: int) -> None:
        """This worker has a new value made at ``owner``, by a message that lists the fork."""
        self._held[fork_id] = _Held(rref_id, owner)

    def forget(self, fork_id: ForkId) -> None:
        """That message is not sent after all."""
        del self._held[fork_id]

    def created(self, fork_id: ForkId) -> None:
        """That message has been handled."""
        self._on_listed(fork_id)

    def drop(self, fork_id: ForkId) -> None:
        """The handle of a fork is gone."""
        held = self._held.get(fork_id)
        if held is not None:  # else it had ended when its message came once more
            held.handles -= 1
            self._end_if_unused(fork_id)

    def _on_listed(self, fork_id: ForkId) -> None:
        self._adding.discard(fork_id)
        held = self._held.get(fork_id)
        if held is not None:
            held.listed = True
        parent = self._parents.pop(fork_id, None)
        if parent is not None:
            del self._held[parent].children[fork_id]
            self._end_if_unused(parent)

    def _end_if_unused(self, fork_id: ForkId) -> None:
        held = self._held[fork_id]
        if not held.handles and not held.children:
            del self._held[fork_id]
            self._ended[fork_id] = None
            if len(self._ended) > _ENDED_REMEMBERED:
                del self._ended[next(iter(self._ended))]
            self._send(held.owner, Verb.DELETE, held.rref_id, fork_id)

    # -- handing on ----------------------------------------------------------------------

    def fork(self, fork: Fork, parent: ForkId | None, receiver: int) -> None:
        """A child is put into a message.

        Args:
            fork: the child.
            parent: this worker's fork that it comes from; None at the owner.
            receiver: where the message goes.
        """
        if parent is None:
            self.add(fork.rref_id, fork.fork_id, receiver)
        elif not self._lost & {receiver, fork.owner}:  # else nobody would answer for the child
            self._held[parent].children[fork.fork_id] = receiver
            self._parents[fork.fork_id] = parent

    def cancel(self, fork: Fork) -> None:
        """The message with the child is not sent after all."""
        if fork.owner == self._rank:
            self._entry(fork.rref_id).forks.pop(fork.fork_id, None)
            self._free_if_unused(fork.rref_id)
        else:
            self._on_listed(fork.fork_id)

    def receive(self, fork: Fork, sender: int) -> None:
        """A child has come in a message from ``sender``; there is a handle for it now."""
        rref_id, fork_id, owner, parent_id = fork
        if owner != self._rank:
            if fork_id in self._held:
                self._held[fork_id].handles += 1
                return
            if fork_id in self._ended:
                return
            self._held[fork_id] = _Held(rref_id, owner, listed=sender == owner)
            if sender != owner and owner not in self._lost:
                self._adding.add(fork_id)
                self._send(owner, Verb.ADD, rref_id, fork_id, sender, parent_id)
            return
        self.hold(rref_id)
        if sender == owner:
            self._delete(rref_id, fork_id, sender)
        else:
            self._announce(rref_id, parent_id, sender, sender)
            self._send(sender, Verb.ADDED, rref_id, fork_id)

    # -- messages and peers --------------------------------------------------------------

    def handle(self, sender: int, message: ReferenceMessage) -> None:
        """A message of the protocol came in."""
        if sender in self._lost:
            return
        if not self._serials_in.setdefault(sender, _Serials()).admit(message.serial):
            return
        verb, _, rref_id, fork_id, parent, parent_id = message
        if verb is Verb.ADD:
            self._announce(rref_id, parent_id, parent, sender)
            self.add(rref_id, fork_id, sender)
            self._send(sender, Verb.ADDED, rref_id, fork_id)
            if parent != sender:
                self._send(parent, Verb.ADDED, rref_id, fork_id)
        elif verb is Verb.ADDED:
            self._on_listed(fork_id)
        else:
            self._delete(rref_id, fork_id, sender)

    def lose(self, rank: int) -> None:
        """A peer is gone: its forks end, and nobody waits for it or for what went to it."""
        self._lost.add(rank)
        for rref_id, owned in list(self._owned.items()):
            for by_rank in (owned.forks, owned.ended_early):
                for fork_id in [f for f, holder in by_rank.items() if holder == rank]:
                    del by_rank[fork_id]
            # A worker that announced and is gone may have told of a parent that has ended.
            for fork_id in [f for f, ranks in owned.announced.items() if rank in ranks]:
                del owned.announced[fork_id]
            self._free_if_unused(rref_id)
        unanswered = {f for f in self._adding if f not in self._held or self._held[f].owner == rank}
        self._adding -= unanswered
        unlisted = [
            child
            for held in self._held.values()
            for child, receiver in held.children.items()
            if rank in (receiver, held.owner)
        ]
        for child in unlisted:
            self._on_listed(child)

    def _send(
        self,
        to: int,
        verb: Verb,
        rref_id: RRefId,
        fork_id: ForkId,
        parent: int = 0,
        parent_id: ForkId = NO_FORK,
    ) -> None:
        serial = self._serials_out.get(to, 0)
        self._serials_out[to] = serial + 1
        message = ReferenceMessage(verb, serial, rref_id, fork_id, parent, parent_id)
        self.outgoing.append((to, message))

"""What a worker knows of values, forks and messages of the reference count. No I/O in here."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial

from zrpc.services.rref.messages import ForkId, RRefId
from zrpc.wire.member_id import MemberId

# A message may arrive after this many that were sent later: what was read from a connection before
# it broke can come after what the next connection brought.
_MAX_AHEAD = 1 << 14
# After this time a message that others have overtaken counts as lost.
_LATE_SECONDS = 2.0
# The latest messages to each member that are kept: as many as are sent as one.
_RESENT = 256
# About this many forks a member is asked at a time; about more of them if some of these are lost.
ASKED = 512


@dataclass(slots=True)
class Owned:
    """One value of an owner's: the forks by holder, and its own handles."""

    forks: dict[ForkId, MemberId] = field(default_factory=dict)
    handles: int = 0
    # Forks whose DELETE came first, with its sender; the message that lists them is in flight.
    ended_early: dict[ForkId, MemberId] = field(default_factory=dict)
    # Forks that a child has named as its parent, with the parent's holder and the worker that
    # named it; the message that lists them is in flight too.
    announced: dict[ForkId, tuple[MemberId, MemberId]] = field(default_factory=dict)

    @property
    def used(self) -> bool:
        """Whether it has a handle or a fork, or a message about one is in flight."""
        return bool(self.forks or self.handles or self.ended_early or self.announced)

    def forget(self, member: MemberId) -> None:
        """Drops the forks of a lost member, and the parents that it named: they may have ended."""
        for by_member in (self.forks, self.ended_early):
            for fork_id in [f for f, holder in by_member.items() if holder == member]:
                del by_member[fork_id]
        for fork_id in [f for f, members in self.announced.items() if member in members]:
            del self.announced[fork_id]


@dataclass(slots=True)
class Held:
    """One fork of a user's."""

    rref_id: RRefId
    owner: MemberId
    handles: int = 1  # more if the message with the fork came twice
    listed: bool = False  # the owner has confirmed it
    children: int = 0  # that it has handed on, and that are not listed yet


@dataclass(slots=True)
class Absent:
    """A fork that has not come, perhaps since it was lost with the call or answer that brought it.

    Attributes:
        rref_id: the value.
        giver: the member that asks.
        parent_id: the fork's parent there; `NO_FORK` if the giver is the owner.
        answers: of the giver to other questions, since it has asked.
    """

    rref_id: RRefId
    giver: MemberId
    parent_id: ForkId
    answers: int = 0


@dataclass(slots=True)
class Serials:
    """The serial numbers seen from one sender: all below ``next``, and those in ``ahead``.

    The numbers of messages that are lost with a connection never come. They count as seen once
    `_MAX_AHEAD` later ones have come.
    """

    next: int = 0
    ahead: set[int] = field(default_factory=set)
    # The last number that was missing in `is_late`, since when, and whether that was said.
    _missing: int = -1
    _since: float = 0.0
    _said: bool = False

    def is_late(self, now: float) -> bool:
        """Returns whether the next number is late, once; it counts as seen if it stays so."""
        if not self.ahead:
            return False
        if self._missing != self.next:
            self._missing, self._since, self._said = self.next, now, False
        elif now - self._since >= _LATE_SECONDS:
            if not self._said:
                self._since, self._said = now, True
                return True
            self.next = min(self.ahead)
            self._advance()
        return False

    def seen(self, serial: int) -> bool:
        """Returns whether a number was noted."""
        return serial < self.next or serial in self.ahead

    def admit(self, serial: int) -> None:
        """Notes a number."""
        self.ahead.add(serial)
        if len(self.ahead) > _MAX_AHEAD:
            self.next = min(self.ahead)
        self._advance()

    def _advance(self) -> None:
        while self.next in self.ahead:
            self.ahead.remove(self.next)
            self.next += 1


@dataclass(slots=True)
class Link:
    """The messages to and from another member that lives.

    Attributes:
        serials: those of the messages from it.
        next: the serial number of the next message to it.
        sent: the latest messages to it, packed, which takes a quarter of the memory.
        asked: the latest forks that it was asked about.
    """

    serials: Serials = field(default_factory=Serials)
    next: int = 0
    sent: deque[bytes] = field(default_factory=partial(deque, maxlen=_RESENT))
    asked: deque[ForkId] = field(default_factory=partial(deque, maxlen=2 * ASKED))

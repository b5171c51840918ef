"""Which of two workers goes if they have lost each other, and others reach both: the rules.

A worker that no longer reaches another one drops it at once, and for good. If a third worker went
on with both, the mesh would never again agree about who its members are. So each worker tells the
others that it talks to whom it has lost. One that learns of such a *pair*, and reaches both of it,
judges it. It puts out the worker that has more such losses; of equals, the one with the higher
rank. All are told who is put out, also that worker, and each tells all others again.

Judges may decide differently, since they need not have heard the same. Then both go. A worker that
is put out stays out, and word of that goes on from each to all. So any two workers that reach each
other, directly or by one other, agree in the end. A worker that reaches all others is in no pair,
and is never put out.

If a mesh is split, nobody reaches both of a pair. Each side goes on as a mesh of its own.

No I/O here: losses and the notes of others go in, notes and verdicts come out.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import IntEnum

from zrpc.errors import expecting
from zrpc.wire.member_id import MemberId, rank_of

# Both ends of a pair, and those of others that broke with it, are found within this part of the
# limit, since that is how far apart heartbeats are.
_SPREAD = 0.2
_MAX_SPREAD_SECONDS = 1.5
_NOTE = struct.Struct("<BIII")


class How(IntEnum):
    """What a note says of a member."""

    UNREACHED = 1  # the sender no longer reaches it
    ENDED = 2  # its process has ended, as a worker on its host has seen
    PUT_OUT = 3  # the judge has put it out


@dataclass(frozen=True, slots=True)
class LossNote:
    """What one worker tells others about a member.

    Attributes:
        how: what has happened to it.
        member: the member.
        judge: of PUT_OUT, who has decided that; else the worker that has found it.
        other: of PUT_OUT, the other one of the pair; else the same as ``judge``.
    """

    how: How
    member: MemberId
    judge: MemberId
    other: MemberId


def pack_notes(notes: Iterable[LossNote]) -> bytes:
    """Returns the body of a message."""
    return b"".join(_NOTE.pack(each.how, each.member, each.judge, each.other) for each in notes)


@expecting("notes about lost members")
def parse_notes(body: bytes | bytearray | memoryview) -> list[LossNote]:
    """Reads the body of a message.

    Raises:
        ProtocolError: it has another form.
    """
    return [
        LossNote(How(how), MemberId(member), MemberId(judge), MemberId(other))
        for how, member, judge, other in _NOTE.iter_unpack(body)
    ]


class Agreement:
    """What one worker knows of losses, and what it must tell. For one thread at a time.

    Args:
        own_id: this worker.
        limit: the longest silence of a member, in seconds.
    """

    def __init__(self, own_id: MemberId, limit: float) -> None:
        self._own_id = own_id
        self._spread = min(limit * _SPREAD, _MAX_SPREAD_SECONDS)
        self._unsettled_until = 0.0
        self._notes: list[LossNote] = []
        self._told: dict[MemberId, int] = {}  # how many of the notes each member was told
        # The pairs of members that have lost each other, and when this worker learned of it.
        self._pairs: dict[tuple[MemberId, MemberId], float] = {}
        # With whom each member was in a pair. Those that were put out since still count.
        self._apart: defaultdict[MemberId, set[MemberId]] = defaultdict(set)

    def settled(self, now: float) -> bool:
        """Whether nobody is about to be put out, as far as is known here."""
        return not self._pairs and now >= self._unsettled_until

    def lose(self, member: MemberId, note: LossNote | None, now: float) -> None:
        """Notes that a member is lost here, and what the others are to be told of that."""
        self._told.pop(member, None)
        self._pairs = {both: at for both, at in self._pairs.items() if member not in both}
        self._apart.pop(member, None)
        if note is None or note.how is not How.PUT_OUT:
            for others in self._apart.values():
                others.discard(member)
        if note is not None:
            self._notes.append(note)
            if note.how is How.UNREACHED:
                # For all judges of a pair to decide, and for word of that to arrive.
                self._unsettled_until = now + 3 * self._spread

    def hear(self, sender: MemberId, note: LossNote, now: float) -> None:
        """Notes that a member no longer reaches another one, which this worker has not lost."""
        if self._own_id in (sender, note.member) or sender == note.member:
            return
        both = min(sender, note.member), max(sender, note.member)
        self._pairs.setdefault(both, now)
        self._apart[sender].add(note.member)
        self._apart[note.member].add(sender)

    def judge(
        self, now: float, living: Collection[MemberId], reaches: Callable[[MemberId], bool]
    ) -> LossNote | None:
        """Returns whom this worker must put out now, if anyone; call it until it returns None.

        The lowest-ranked worker that is not of the pair decides. If it does not, the others do.

        Args:
            now: the time, in seconds.
            living: the members that this worker has not lost, itself included.
            reaches: returns whether a member answers this worker.
        """
        for both, known_at in self._pairs.items():
            first = min((m for m in living if m not in both), key=_order, default=None)
            wait = self._spread if first == self._own_id else 2 * self._spread
            if now - known_at >= wait and all(map(reaches, both)):
                loser = max(both, key=lambda member: (len(self._apart[member]), _order(member)))
                [other] = {*both} - {loser}
                return LossNote(How.PUT_OUT, loser, self._own_id, other)
        return None

    def untold(self, member: MemberId) -> list[LossNote]:
        """Returns what a member was not told yet; it counts as told from then on."""
        told = self._told.get(member, 0)
        self._told[member] = len(self._notes)
        return self._notes[told:]

    def is_told(self, member: MemberId) -> bool:
        """Returns whether a member was told all."""
        return self._told.get(member, 0) == len(self._notes)

    def tell_again(self, member: MemberId) -> None:
        """Notes that messages to a member may be lost."""
        self._told.pop(member, None)


def _order(member: MemberId) -> tuple[int, MemberId]:
    return rank_of(member), member

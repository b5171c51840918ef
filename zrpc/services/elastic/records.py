"""The entries of a mesh's log: events, and snapshots of the state that they lead to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from zrpc.membership.failure_detector import Reason
from zrpc.membership.peer_record import PeerRecord
from zrpc.wire.member_id import RANKS, MemberId

__all__ = ["Departure", "MembershipEvent", "StateSnapshot", "Verb"]


class Verb(Enum):
    """What an event is about."""

    JOIN = "join"
    IN = "in"
    GONE = "gone"


class Departure(Enum):
    """Why a worker is gone."""

    LEFT = "left"
    ENDED = "ended"  # its process
    REPLACED = "replaced"  # by its next incarnation
    REFUSED = "refused"  # a member can't trust it

    @property
    def reason(self) -> Reason:
        """As the agent's peers know it."""
        return Reason[self.name]


@dataclass(frozen=True, slots=True)
class MembershipEvent:
    """One event of the log."""

    verb: Verb
    token: str  # of the worker that it is about
    record: PeerRecord | None = None  # for JOIN
    # For GONE, with details for the readers of a log file.
    why: Departure | None = None
    text: str = ""

    def dump(self) -> str:
        """Returns the event as text."""
        record = None if self.record is None else self.record.dump()
        why = None if self.why is None else self.why.value
        return json.dumps([self.verb.value, self.token, record, why, self.text])

    @classmethod
    def parse(cls, text: str) -> MembershipEvent:
        """Reads an event that was written by `dump`.

        Raises:
            ValueError: it isn't an event of this version of zrpc.
        """
        try:
            verb, token, record, why, more = json.loads(text)
            event = cls(
                Verb(verb),
                str(token),
                None if record is None else PeerRecord.parse(record),
                None if why is None else Departure(why),
                str(more),
            )
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"expected an event of a mesh's log, found another: {error}") from None
        wanted = (event.verb is Verb.JOIN, event.verb is Verb.GONE)
        if wanted != (event.record is not None, event.why is not None):
            raise ValueError(f"expected an event of a mesh's log, found half of one: {text:.99}")
        if event.record is not None and event.record.token != event.token:
            raise ValueError("expected the record of the event's worker, found another worker's")
        return event


@dataclass(frozen=True, slots=True)
class StateSnapshot:
    """The state of a mesh at some position of its log.

    It is as long as the mesh is large. It counts all members there ever were, but in runs: ranks
    that are given one after the other take one entry. See `MembershipState` for its attributes.
    """

    position: int
    members: Mapping[MemberId, PeerRecord]
    joined: Mapping[MemberId, int]  # the position of the event with which each joined
    admitted: frozenset[MemberId]
    departed: Mapping[MemberId, tuple[PeerRecord, Departure]]
    starts: Mapping[int, int]

    def dump(self) -> str:
        """Returns the snapshot as text."""
        members = [
            [record.dump(), self.joined[member], member in self.admitted]
            for member, record in self.members.items()
        ]
        departed = [[record.dump(), why.value] for record, why in self.departed.values()]
        return json.dumps([self.position, members, departed, _runs(self.starts)])

    @classmethod
    def parse(cls, text: str) -> StateSnapshot:
        """Reads a snapshot that was written by `dump`.

        Raises:
            ValueError: it isn't a snapshot of this version of zrpc.
        """
        try:
            position, members, departed, runs = json.loads(text)
            found = [(PeerRecord.parse(each), int(at), bool(is_in)) for each, at, is_in in members]
            gone = [(PeerRecord.parse(each), Departure(why)) for each, why in departed]
            return cls(
                position=int(position),
                members={record.member_id: record for record, _, _ in found},
                joined={record.member_id: at for record, at, _ in found},
                admitted=frozenset(record.member_id for record, _, is_in in found if is_in),
                departed={record.member_id: (record, why) for record, why in gone},
                starts=dict(_counts(runs)),
            )
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"expected a snapshot of a mesh's state: {error}") from None


def _counts(runs: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int]]:
    for first, end, count in runs:
        if not 0 <= first < end <= RANKS:
            raise ValueError(f"ranks from {first} to {end}")
        yield from ((rank, int(count)) for rank in range(first, end))


def _runs(counts: Mapping[int, int]) -> list[list[int]]:
    """Returns counts by rank as runs of equal ones: first rank, rank after the last, count."""
    runs: list[list[int]] = []
    for rank, count in sorted(counts.items()):
        if runs and runs[-1][1:] == [rank, count]:
            runs[-1][1] = rank + 1
        else:
            runs.append([rank, rank + 1, count])
    return runs

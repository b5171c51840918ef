"""Which workers are in a mesh that they join and leave while it runs: the rules. No I/O here.

Workers append events to a log, which all read in the same order (``zrpc.services.elastic.log``). So
all come to the same view of the mesh, whatever happens at the same time.

======= ================== =================================================================
event   from               meaning
======= ================== =================================================================
JOIN    a worker           I ask for this name and this rank (its record)
IN      the same worker    all members know me by now: I can be found from here on
GONE    any worker         that worker has left, or its process has ended
======= ================== =================================================================

- A name or a rank that a member has is refused to all others, until that member is gone. But a
  worker that was restarted under its own name and rank replaces its predecessor, which has died,
  whether or not anybody has noticed.
- The number of members that had a rank before is a member's incarnation. All workers count the
  same, since all read the same.
- A worker that is refused may ask again. Once accepted, it is not accepted again: an old record of
  an old incarnation is never taken for a new one's.

Only the last members that are gone are remembered, and of all others how many there were of each
rank. So the state does not grow as workers come and go, and it fits into one entry,
a snapshot: a reader of that knows what all earlier events said.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from zrpc.membership.failure_detector import Reason
from zrpc.membership.peer_record import PeerRecord
from zrpc.membership.worker_info import WorkerInfo
from zrpc.services.elastic.limits import DEFAULT_LIMITS, ElasticLimits
from zrpc.wire.member_id import INCARNATIONS, NOBODY, RANKS, MemberId, member_id_of


class Verb(Enum):
    """What an event is about."""

    JOIN = "join"
    IN = "in"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class MembershipEvent:
    """One event of the log."""

    verb: Verb
    token: str  # of the worker that it is about
    record: PeerRecord | None = None  # for JOIN
    # For GONE, with details for the readers of a log file.
    why: Reason | None = None
    text: str = ""

    def dump(self) -> str:
        """Returns the event as text."""
        record = None if self.record is None else self.record.dump()
        why = None if self.why is None else self.why.name
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
                None if why is None else Reason[why],
                str(more),
            )
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise ValueError(f"expected an event of a mesh's log, found another: {error}") from None
        wanted = (event.verb is Verb.JOIN, event.verb is Verb.GONE)
        if wanted != (event.record is not None, event.why is not None):
            raise ValueError(f"expected an event of a mesh's log, found half of one: {text:.99}")
        if event.record is not None and event.record.token != event.token:
            raise ValueError("expected the record of the event's worker, found another worker's")
        return event


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the view that all workers share."""

    # JOIN: the worker is introduced. IN: it can be found. GONE: it is lost.
    verb: Verb
    record: PeerRecord  # with its incarnation
    # For GONE, with details for the readers of a log file.
    why: Reason | None = None
    text: str = ""


class MembershipState:
    """What the log says up to some position. For one thread at a time."""

    def __init__(self, limits: ElasticLimits = DEFAULT_LIMITS) -> None:
        self.limits = limits
        self.position = 0  # how many events were applied
        # The records of all workers that are accepted and not gone, and which can be found.
        self.members: dict[MemberId, PeerRecord] = {}
        self.admitted: set[MemberId] = set()
        # The last members that are gone, and why; in a mesh of a fixed size, all of them.
        self.departed: dict[MemberId, tuple[PeerRecord, Reason]] = {}
        self.starts: Counter[int] = Counter()  # how many members each rank has had
        # The tokens of members that are gone, by the position of the event that said so.
        self.lost: dict[int, str] = {}
        self._joined: dict[str, tuple[MemberId, int]] = {}  # by token: the member, the position
        self._refused: dict[str, str] = {}

    def apply(self, entry: MembershipEvent | MembershipState | None) -> list[Change]:
        """Applies the next event, or a snapshot in place of all events up to its position.

        Returns the changes, in order. None stands for an event that could not be read.
        """
        if isinstance(entry, MembershipState):
            return list(self._skip_to(entry))
        self.position += 1
        if entry is None:
            return []
        if entry.record is not None:
            return list(self._join(entry.record))
        member, _ = self._joined.get(entry.token, (NOBODY, 0))
        if member not in self.members:
            return []  # of no member, or repeated
        if entry.verb is Verb.GONE:
            assert entry.why is not None
            return [self._lose(member, entry.why, entry.text)]
        if member in self.admitted:
            return []
        self.admitted.add(member)
        return [Change(Verb.IN, self.members[member])]

    def dump(self) -> str:
        """Returns a snapshot of this state, as text.

        It is as long as the mesh is large. It counts all members there ever were, but in runs:
        ranks that are given one after the other take one entry.
        """
        members = [
            [record.dump(), self._joined[record.token][1], member in self.admitted]
            for member, record in self.members.items()
        ]
        departed = [[record.dump(), why.name] for record, why in self.departed.values()]
        return json.dumps([self.position, members, departed, _runs(self.starts)])

    @classmethod
    def parse(cls, text: str) -> MembershipState:
        """Reads a snapshot that was written by `dump`.

        Raises:
            ValueError: it isn't a snapshot of this version of zrpc.
        """
        state = cls()
        try:
            position, members, departed, runs = json.loads(text)
            state.position = int(position)
            for dumped, at, is_in in members:
                record = PeerRecord.parse(dumped)
                state.members[record.member_id] = record
                state._joined[record.token] = record.member_id, int(at)
                if is_in:
                    state.admitted.add(record.member_id)
            for dumped, why in departed:
                record = PeerRecord.parse(dumped)
                state.departed[record.member_id] = record, Reason[why]
            for first, end, count in runs:
                if not 0 <= first < end <= RANKS:
                    raise ValueError(f"ranks from {first} to {end}")
                state.starts.update(dict.fromkeys(range(first, end), int(count)))
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise ValueError(f"expected a snapshot of a mesh's state: {error}") from None
        return state

    def forget_lost(self, position: int) -> None:
        """Forgets the tokens in `lost` from events up to a position."""
        self.lost = {place: token for place, token in self.lost.items() if place > position}

    def member_of(self, token: str) -> MemberId | None:
        """Returns the member with this token; None if there is none."""
        return self._joined[token][0] if token in self._joined else None

    def joined_at(self, token: str) -> int:
        """Returns the position of the event with which the member with this token joined."""
        return self._joined[token][1]

    def refusal(self, token: str) -> str | None:
        """Returns why the worker with this token was refused last; None if it was not."""
        return self._refused.get(token)

    def obstacle(self, record: PeerRecord) -> PeerRecord | None:
        """Returns the member that has the name or the rank that a record asks for."""
        for member in self.members.values():
            if member.rank == record.rank or member.name == record.name:
                again = (member.name, member.rank) == (record.name, record.rank)
                if not (again and record.restarts > member.restarts):
                    return member
        return None

    def mismatch(self, record: PeerRecord) -> str | None:
        """Returns why a worker does not fit this mesh, whatever its name and rank."""
        other = next(iter(self.members.values()), None)
        return None if other is None else record.mismatch(other)

    @property
    def missing(self) -> list[int]:
        """The ranks that have no admitted member, in a mesh of a fixed size."""
        size = max((record.world_size for record in self.members.values()), default=0)
        return sorted(set(range(size)) - {self.members[member].rank for member in self.admitted})

    def left_during_restart(self, record: PeerRecord) -> list[WorkerInfo]:
        """Returns the workers of a mesh of a fixed size that left while a worker was restarted.

        Empty if that worker's predecessor has left too: then all may meet in a new mesh.
        """
        predecessor = member_id_of(record.rank, record.incarnation - 1)
        _, why = self.departed.get(predecessor, (record, None))
        return [] if why in (None, Reason.LEFT) else self.left()

    def left(self) -> list[WorkerInfo]:
        """Returns the missing workers of a mesh of a fixed size that have left it of late."""
        ranks = [rank for rank in self.missing if self.starts[rank]]
        last = [member_id_of(rank, self.starts[rank] - 1) for rank in ranks]
        found = [self.departed[member] for member in last if member in self.departed]
        return [record.info for record, why in found if why is Reason.LEFT]

    def _join(self, record: PeerRecord) -> Iterator[Change]:
        if record.token in self._joined or any(
            record.token == gone.token for gone, _ in self.departed.values()
        ):
            return  # accepted before: somebody repeats an old record
        refusal = self._objection(record)
        if refusal is not None:
            self._refused[record.token] = refusal
            self._shorten(self._refused)
            return
        self._refused.pop(record.token, None)
        for member, other in list(self.members.items()):
            if other.rank == record.rank:
                yield self._lose(member, Reason.REPLACED)
        record = replace(record, incarnation=self.starts[record.rank])
        self.starts[record.rank] += 1
        self.members[record.member_id] = record
        self._joined[record.token] = (record.member_id, self.position)
        yield Change(Verb.JOIN, record)

    def _objection(self, record: PeerRecord) -> str | None:
        """Returns why a worker can't be accepted now; None if it can."""
        if (mismatch := self.mismatch(record)) is not None:
            return mismatch
        if not 0 <= record.rank < (record.world_size or RANKS):
            return f"expected a rank below {record.world_size or RANKS}, found {record.rank}"
        if self.starts[record.rank] >= INCARNATIONS:
            return f"rank {record.rank} was used {INCARNATIONS} times: take another one"
        other = self.obstacle(record)
        if other is None:
            return None
        if other.rank == record.rank:
            return (
                f"rank {record.rank} is not unique: workers {other.name} and {record.name} both "
                "ask for it"
            )
        return (
            f"worker name {record.name} is not unique: ranks {other.rank} and {record.rank} both "
            "ask for it"
        )

    def _lose(self, member: MemberId, why: Reason, text: str = "") -> Change:
        record = self.members.pop(member)
        self.admitted.discard(member)
        del self._joined[record.token]
        self.lost[self.position] = record.token
        self.departed[member] = (record, why)
        if not record.world_size:  # else the number of restarts limits it
            self._shorten(self.departed)
        return Change(Verb.GONE, record, why, text)

    def _skip_to(self, snapshot: MembershipState) -> Iterator[Change]:
        """Takes over a snapshot; the events before it need not be read."""
        members, admitted = self.members, self.admitted
        self.position, self.starts = snapshot.position, snapshot.starts
        self.members, self.admitted = snapshot.members, snapshot.admitted
        self.departed, self.lost, self._joined = snapshot.departed, {}, snapshot._joined
        for member, record in members.items():
            if member not in self.members:
                _, why = self.departed.get(member, (record, Reason.LEFT))
                yield Change(Verb.GONE, record, why)
        for member, record in self.members.items():
            if member not in members:
                yield Change(Verb.JOIN, record)
            if member in self.admitted - admitted:
                yield Change(Verb.IN, record)

    def _shorten(self, remembered: dict[Any, Any]) -> None:
        """Keeps the last entries."""
        while len(remembered) > self.limits.remembered:
            del remembered[next(iter(remembered))]


def _runs(counts: Mapping[int, int]) -> list[list[int]]:
    """Returns counts by rank as runs of equal ones: first rank, rank after the last, count."""
    runs: list[list[int]] = []
    for rank, count in sorted(counts.items()):
        if runs and runs[-1][1:] == [rank, count]:
            runs[-1][1] = rank + 1
        else:
            runs.append([rank, rank + 1, count])
    return runs

"""How the workers of a mesh meet: by one roster, in any ``torch.distributed.Store``.

=============== ================ =============================================================
entry           written by       its value
=============== ================ =============================================================
leader          rank 0           its record
record/T/RANK   each other rank  its record: it has come; then also its endpoint, or the reason
                                 why it has none: it takes part
roster/T/0      rank 0           the records of all: all have come
roster/T/1      rank 0           the endpoints of all: they have met; or why they have not
heard/T/RANK    each other rank  it has read why they have not
=============== ================ =============================================================

T is the token of rank 0, which it draws at its start. So nothing that an earlier mesh has left in
the store, and nothing that is written there again, is taken for an entry of this one: entries are
signed with their keys (``zrpc.membership.signed_store``). An old rank 0 is waited out.

So a worker makes five requests, however many there are, and polls for what it waits for.

A mesh stands for all of its workers or for none. A worker that has answered the roster and gives up
writes "abandoned" in the place of the next one, unless it is there (an atomic compare_set): what is
written then counts for all. Then, and if another worker has come in the place of one, as it was
started again, rank 0 writes another roster, which all answer.

Rank 0 may host the store. If a worker loses it after it has found itself in a roster, rank 0 has
ended. Before that, it may have been the store of an earlier mesh, whose host had yet to close it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed import DistNetworkError, Store, TCPStore

from zrpc.errors import AuthenticationError, OptionError, RendezvousError, RpcError
from zrpc.membership.attendance import NOBODY, Arrival, Attendance, claimed_token
from zrpc.membership.launched import ended_error
from zrpc.membership.missing_ranks import describe_places
from zrpc.membership.peer_record import PeerRecord
from zrpc.membership.secret import ClusterSecret
from zrpc.membership.signed_store import SignedStore
from zrpc.membership.store_request import wait_for

_LEADER = "leader"
# What is known at a roster; what follows that.
_ROSTER = "roster"  # the records
_MET = "met"  # the endpoints
_ABANDONED = "abandoned"  # nothing
# Or the text of an error.
_ERRORS = {"failed": RendezvousError, "stranger": AuthenticationError, "option": OptionError}
_MAX_ROSTER_BYTES = 1 << 23  # more than 4096 records; TCPStore takes no longer entry


@dataclass(frozen=True, slots=True)
class RendezvousTiming:
    """The times of a rendezvous."""

    # How long rank 0 stays at most for the others to read why there is no mesh, as one of them may
    # have died; and how long after its own time is over.
    failure_read_seconds: float = 5.0
    overtime_seconds: float = 0.5
    # How often rank 0 reads the records that exist while some are missing, and the others its own.
    look_seconds: float = 0.5
    # How much longer rank 0 waits between two such reads for each rank.
    look_seconds_per_rank: float = 0.02
    # The longest pause between two polls of a worker, for each rank: all of them poll one store.
    poll_seconds_per_rank: float = 0.001


TIMING = RendezvousTiming()


class StoreLost(RendezvousError):
    """The connection to the store was lost before its mesh stood; it may be an earlier mesh's."""


class _LeaderReplaced(Exception):
    """Rank 0 was started again, or another mesh uses the store."""


def meet(
    store: Store,
    record: PeerRecord,
    timeout: float,
    secret: ClusterSecret | None = None,
    timing: RendezvousTiming = TIMING,
    listen: Callable[[list[PeerRecord]], str] = lambda _: "",
    check: Callable[[list[PeerRecord]], None] = lambda _: None,
) -> list[PeerRecord]:
    """Meets all other ranks; returns the records of all, with their endpoints.

    Args:
        store: shared by all.
        record: this worker's.
        timeout: seconds.
        secret: signs the records.
        timing: the times of this rendezvous.
        listen: gets the records of all and returns this worker's endpoint for TCP, empty if it
            needs none. If it raises an RpcError, no worker joins. It is called again for the next
            roster.
        check: raises an RpcError if these workers can't form a mesh; called by rank 0.

    Raises:
        RendezvousError: ranks are missing when the timeout passes; two workers have one name
            or one rank; the world sizes differ; a worker can't listen; the store fails.
        StoreLost: the store is gone, and there was no roster with this worker's record in it.
        AuthenticationError: workers have different secrets, or only some have one; an entry in the
            store is not from one of them.
    """
    with store_errors():
        if record.rank:
            return _Guest(store, record, timeout, secret, timing, listen).run()
        return _Leader(store, record, timeout, secret, timing, listen).run(check)


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """Raises a RendezvousError if a store fails while workers meet in it."""
    try:
        yield
    except RpcError:
        raise
    except (RuntimeError, OSError) as error:
        kind = StoreLost if isinstance(error, DistNetworkError) else RendezvousError
        raise kind(
            f"the store failed while the workers were meeting: {error}. If its host (rank 0, or "
            "the launcher) has exited, its own error says why"
        ) from error


@dataclass(eq=False)
class _Worker:
    """What rank 0 and the others have in common; one call of `meet`."""

    _store: Store
    _record: PeerRecord
    _timeout: float
    _secret: ClusterSecret | None
    _timing: RendezvousTiming
    _listen: Callable[[list[PeerRecord]], str]

    def __post_init__(self) -> None:
        store, record = self._store, self._record
        place = f" at {store.host}:{store.port}" if isinstance(store, TCPStore) else ""
        another = "is that of another mesh: give each mesh a MASTER_PORT of its own"
        self._note = f" (or the store{place} {another})" if place else ""
        self._expected = f"expected {record.world_size} workers{place} within {self._timeout:g} s,"
        self._deadline = time.monotonic() + self._timeout
        self._entries = SignedStore(store, self._secret, self._deadline)
        self._attendance = Attendance(self._entries, record, record.token)
        self._failure: RpcError | None = None  # why this worker can't listen

    def _answer(self, records: list[PeerRecord], number: int) -> Arrival:
        """Listens for the workers of a roster."""
        self._failure = None
        try:
            return Arrival(replace(self._record, endpoint=self._listen(records)), answers=number)
        except RpcError as error:
            self._failure = error
            return Arrival(self._record, answers=number, trouble=str(error))

    def _decide(self, key: str, *finding: str) -> str:
        """Writes a finding unless there is one; returns what counts."""
        text = self._entries.get_or_set(key, json.dumps(finding), _MAX_ROSTER_BYTES)
        return str(_parsed(text)[0])

    def _ended(self, awaited: Iterable[int]) -> RendezvousError | None:
        return ended_error(awaited, self._record.rank, self._record.world_size)

    def _left(self, records: list[PeerRecord]) -> RendezvousError:
        infos = [record.info for record in records]
        return RendezvousError(
            f"{self._expected} but {infos} left again, do not answer, or are from an earlier run"
            f"{self._note}: start them again"
        )

    def _leader_in(self, entry: bytes) -> PeerRecord:
        return PeerRecord.parse(self._entries.verified(_LEADER, entry))

    def _not_unique(self, other: PeerRecord) -> RendezvousError:
        places = describe_places([self._record, other])
        return RendezvousError(f"rank {other.rank} is not unique: workers {places} both have it")


class _Leader(_Worker):
    """Rank 0, which writes the rosters."""

    def run(self, check: Callable[[list[PeerRecord]], None]) -> list[PeerRecord]:
        own, attendance = Arrival(self._record), self._attendance
        self._entries.set(_LEADER, self._record.dump())
        for number in itertools.count():
            key = f"roster/{self._record.token}/{number}"
            error = self._gather()
            arrivals = [own, *(attendance.came[rank] for rank in sorted(attendance.came))]
            records = [arrival.record for arrival in arrivals]
            tokens = {record.token for record in records}
            met = attendance.asked[0] == tokens
            error = error or (_flaw(arrivals, check) if met else None)
            if error is not None:
                self._tell(key, error)
                raise self._failure or error
            values = [record.endpoint if met else record.dump() for record in records]
            verb = self._decide(key, _MET if met else _ROSTER, *values)
            if verb == _MET:
                return records
            attendance.asked = (tokens, number) if verb == _ROSTER else (set(), -1)
            if verb == _ROSTER:
                own = self._answer(records, number)
        raise AssertionError

    def _gather(self) -> RpcError | None:
        """Waits until all have come, and those in the last roster have answered it.

        Returns why there can't be a mesh; None if there may be one.
        """
        attendance, timing = self._attendance, self._timing
        pause = max(timing.look_seconds, timing.look_seconds_per_rank * self._record.world_size)
        ended: RpcError | None = None

        def look() -> None:
            nonlocal ended
            self._look_at_leader()
            attendance.look()
            ended = self._ended(set(attendance.absent).difference(attendance.came))

        def done() -> bool:
            return attendance.complete() or bool(attendance.refused or ended)

        complete = wait_for(done, self._deadline, look, pause)
        if attendance.refused:
            return attendance.mutual_refusal()
        if ended is not None:
            return ended
        if not complete:
            attendance.look()
            attendance.read(sorted(attendance.came))  # others may have taken their places since
        if (why := attendance.misfit(self._expected, self._note)) or complete:
            return why
        late = attendance.late(False) or attendance.late(True)
        return attendance.missing(self._expected) or self._left(late)

    def _look_at_leader(self) -> None:
        """Raises an error if another worker has taken the place of this one."""
        own = self._record
        try:
            found = self._leader_in(self._entries.get_raw(_LEADER))
        except (AuthenticationError, ValueError) as error:
            raise AuthenticationError(
                f"the record of worker {own.name} (rank 0) was replaced: {error}"
            ) from error
        if found.token != own.token:
            raise self._not_unique(found)

    def _tell(self, key: str, error: RpcError) -> None:
        """Writes why there is no mesh, and waits until the others have read that.

        Rank 0 may host the store, and a failure here often ends its program.
        """
        attendance, timing, now = self._attendance, self._timing, time.monotonic()
        readers = {rank for rank, each in attendance.came.items() if not each.left}
        keys = [f"heard/{self._record.token}/{rank}" for rank in readers.union(attendance.refused)]
        overtime = max(self._deadline, now + timing.overtime_seconds)
        kind = next((kind for kind, of in _ERRORS.items() if isinstance(error, of)), "failed")
        with contextlib.suppress(RuntimeError, OSError):
            if self._decide(key, kind, str(error)) == kind and keys:
                until = min(now + timing.failure_read_seconds, overtime)
                wait_for(lambda: self._entries.check(keys), until)


class _Guest(_Worker):
    """Another worker than rank 0."""

    def run(self) -> list[PeerRecord]:
        self._leader: PeerRecord | None = None  # the last one that was not refused
        self._is_stranger = False  # the leader that this worker answers
        self._over: set[str] = set()  # the tokens of leaders that this worker can't meet
        self._answered: list[PeerRecord] = []  # the last roster, if this worker is in it
        self._pause = self._timing.poll_seconds_per_rank * self._record.world_size
        while True:
            try:
                return self._follow(self._await_leader())
            except _LeaderReplaced:
                self._answered = []
            except DistNetworkError as error:
                raise self._store_lost(error) from error

    def _attend(self, token: str) -> None:
        """Writes this worker's record for a leader, or because there is none."""
        refused, leader = self._attendance.refused, self._leader
        self._attendance = Attendance(self._entries, self._record, token)
        self._attendance.refused |= refused
        if leader is not None and leader.token == token:
            self._attendance.came[0] = Arrival(leader)
        self._attendance.arrive()

    def _await_leader(self) -> str:
        """Waits for a leader that may be that of this mesh; returns its token."""

        def done() -> bool:
            return bool(self._find_leader())

        def look() -> None:
            if (error := self._ended([0])) is not None:
                raise error

        token = self._find_leader()
        if not token:
            self._attend(NOBODY)
            if not wait_for(done, self._deadline, look, self._timing.look_seconds, self._pause):
                raise self._too_late()
            token = self._find_leader()
        return token

    def _find_leader(self) -> str:
        if not self._entries.check([_LEADER]):
            return ""
        entry = self._entries.get_raw(_LEADER)
        try:
            self._leader = self._leader_in(entry)
            self._attendance.refused.pop(0, None)
        except (AuthenticationError, ValueError) as error:
            self._attendance.refuse(0, error)
        token = claimed_token(entry)
        return "" if token in self._over else token

    def _follow(self, token: str) -> list[PeerRecord]:
        """Goes by the rosters of a leader."""
        self._is_stranger = 0 in self._attendance.refused
        late = self._entries.check([f"roster/{token}/0"])
        if late and self._is_stranger:
            self._over.add(token)
            raise _LeaderReplaced
        self._attend(token)
        for number in itertools.count():
            verb, *values = self._await(token, f"roster/{token}/{number}")
            if verb in _ERRORS and (self._answered or not late):
                self._entries.set(f"heard/{token}/{self._record.rank}", "1")
                raise self._failure or _ERRORS[verb](values[0])
            if verb == _MET and self._answered:
                pairs = zip(self._answered, values, strict=True)
                return [replace(record, endpoint=endpoint) for record, endpoint in pairs]
            if verb == _ROSTER:
                self._on_roster(values, number)
            elif verb == _ABANDONED:
                self._answered = []
            else:  # of an earlier mesh, or of another one
                self._over.add(token)
                raise _LeaderReplaced
        raise AssertionError

    def _on_roster(self, records: list[PeerRecord], number: int) -> None:
        """Answers a roster with this worker in it; it may have come after that was written.

        Raises:
            RendezvousError: another worker of this rank has come later.
        """
        attendance, self._answered = self._attendance, []
        if any(record.token == self._record.token for record in records):
            self._answered = records
            attendance.asked = {record.token for record in records}, number
            attendance.came = {0: Arrival(records[0], answers=number)}
            attendance.write(self._answer(records, number))
        else:
            last = attendance.present()
            if last is not None and last.record.token != self._record.token:
                raise self._not_unique(last.record)

    def _await(self, token: str, key: str) -> list[Any]:
        """Waits for a roster; writes that this worker gives up if it comes too late.

        Raises:
            _LeaderReplaced: there is another leader.
            RendezvousError: it is too late.
        """

        def look() -> None:
            if self._find_leader() not in ("", token):
                raise _LeaderReplaced

        error: Exception
        try:
            wait = self._deadline, look, self._timing.look_seconds, self._pause
            if wait_for(lambda: self._entries.check([key]), *wait):
                return self._read(token, key)
            error = self._too_late()
        except _LeaderReplaced as replaced:
            error = replaced
        if self._answered and self._decide(key, _ABANDONED) not in (_ABANDONED, _ROSTER):
            return self._read(token, key)
        if not isinstance(error, _LeaderReplaced):
            self._attendance.leave()
        raise error

    def _read(self, token: str, key: str) -> list[Any]:
        if self._is_stranger:
            self._entries.set(f"heard/{token}/{self._record.rank}", "1")
            raise self._attendance.mutual_refusal()
        entry = self._entries.get_raw(key)
        return _parsed(self._entries.verified(key, entry, _MAX_ROSTER_BYTES))

    def _too_late(self) -> RpcError:
        """Returns why there is no mesh at the deadline."""
        attendance, leaders = self._attendance, [self._leader] if self._leader else []
        attendance.look()
        attendance.read([self._record.rank])  # another worker may have the same rank
        if misfit := attendance.misfit(self._expected, self._note):
            return misfit
        if not any(leader.token in self._over for leader in leaders):
            if missing := attendance.missing(self._expected):
                return missing
            leaders = attendance.late(False) or leaders + attendance.late(True)
        return self._left(leaders)

    def _store_lost(self, error: Exception) -> RpcError:
        """Returns the error for a lost store, with what explains more than that."""
        if self._answered:
            return RendezvousError(
                f"expected all {self._record.world_size} workers to go on together once they had "
                f"met, but lost their store ({error}): its host has exited, which is "
                f"{self._answered[0].info}, or the launcher if that hosts it; find out why it "
                "exited"
            )
        if misfit := self._attendance.misfit(self._expected, self._note):
            return StoreLost(f"{misfit}; then the store was lost: {error}")
        raise error


def _parsed(text: str) -> list[Any]:
    """Returns what is known at a roster, and the records or texts that belong to it."""
    try:
        verb, *values = json.loads(text)
        parse: Callable[[Any], object] = PeerRecord.parse if verb == _ROSTER else str
        return [verb, *map(parse, values)]
    except (ValueError, TypeError, RecursionError) as error:
        raise AuthenticationError(f"expected a roster, found another entry: {error}") from None


def _flaw(arrivals: list[Arrival], check: Callable[[list[PeerRecord]], None]) -> RpcError | None:
    """Returns why these workers can't form a mesh; None if they can."""
    by_name: dict[str, PeerRecord] = {}
    for record in (arrival.record for arrival in arrivals):
        if (other := by_name.setdefault(record.name, record)) is not record:
            ranks = f"ranks {other.rank} and {record.rank}"
            return RendezvousError(f"worker name {record.name} is not unique: {ranks} both have it")
    for arrival in arrivals:
        if arrival.trouble:
            return RendezvousError(
                f"expected all workers to publish where they listen, but {arrival.record.info} on "
                f"{arrival.record.host} failed: {arrival.trouble}"
            )
    try:
        check([arrival.record for arrival in arrivals])
    except RpcError as error:
        return error
    return None

"""How the workers of a mesh meet: by one roster, in any ``torch.distributed.Store``.

====================== ================ ======================================================
entry                  written by       its value
====================== ================ ======================================================
leader                 rank 0           its record
record/T/RANK          each other rank  its record: it has come
roster/T/N             rank 0           the records of all: all have come
endpoint/T/N/RANK      each other rank  where it listens, or why it can't: it takes part
outcome/T/N            rank 0           the endpoints of all: they have met; or why they have not
====================== ================ ======================================================

T is the token of rank 0, which it draws at its start. So nothing that is left in a store of an
earlier mesh (torchrun's outlives it, a file may), and nothing that is written there again, is taken
for an entry of this one: all entries are signed together with their keys
(``zrpc.membership.signed_store``). A worker that finds an old rank 0 waits for the next one.

A worker reads two entries and writes two, besides that of rank 0, however many there are.

A mesh stands for all of its workers or for none. A worker takes part only if its own record is in
the roster, and whoever gives up after that writes "abandoned" as the outcome, unless there is one
(an atomic compare_set): what is written then counts for all. After an abandoned outcome, or if a
record was replaced by that of a worker that was started again, rank 0 writes the next roster (N).

Rank 0 may host the store. If a worker loses it after it has read its record in a roster, rank 0 has
ended. Before that, it may have been the store of an earlier mesh, whose host had yet to close it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from torch.distributed import DistNetworkError, Store, TCPStore

from zrpc.errors import AuthenticationError, RendezvousError, RpcError
from zrpc.membership.attendance import NOBODY, Arrival, Attendance, claimed_token
from zrpc.membership.launched import stop_error
from zrpc.membership.missing_ranks import describe_places
from zrpc.membership.peer_record import PeerRecord
from zrpc.membership.secret import ClusterSecret
from zrpc.membership.signed_store import SignedStore

__all__ = ["TIMING", "RendezvousTiming", "StoreLost", "meet", "store_errors"]

_LEADER = "leader"
# What an endpoint's entry begins with: the endpoint follows, or the reason why there is none.
_LISTENS = "="
_CAN_NOT = "!"
_MAX_ROSTER_BYTES = 1 << 23  # more than 4096 records; TCPStore takes no longer entry
# The store is polled with a pause that grows from the first number to the second. Its own wait()
# would be an event to await, but Ctrl-C does not end it, TCPStore logs each timeout of it as a
# network error, and FileStore's polls once a second.
_PAUSE_SECONDS = (0.001, 0.05)
_KINDS: dict[str, type[RpcError]] = {
    kind.__name__: kind for kind in (RpcError, RendezvousError, AuthenticationError)
}


@dataclass(frozen=True, slots=True)
class RendezvousTiming:
    """The times of a rendezvous."""

    # How long rank 0 stays at most for the others to read why there is no mesh, as one of them may
    # have died; and how long after its own time is over.
    failure_read_seconds: float = 5.0
    overtime_seconds: float = 0.5
    # How often rank 0 reads the records that exist while others are missing, and each of the others
    # that of rank 0.
    look_seconds: float = 0.5
    # How much longer rank 0 waits between two such reads for each rank.
    look_seconds_per_rank: float = 0.02


TIMING = RendezvousTiming()


class StoreLost(RendezvousError):
    """The connection to the store was lost before its mesh stood; it may be an earlier mesh's."""


class _Failed(Exception):
    """There is no mesh, and the others must be told."""

    def __init__(self, error: RpcError) -> None:
        super().__init__(error)
        self.error = error


class _Again(Exception):
    """The workers in the roster don't all go on: there must be another one."""


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
    place = f" at {store.host}:{store.port}" if isinstance(store, TCPStore) else ""
    entries = SignedStore(store, secret, time.monotonic() + timeout)
    with store_errors():
        if record.rank:
            return _Guest(entries, record, timeout, timing, place, listen).run()
        return _Leader(entries, record, timeout, timing, place, listen).run(check)


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


class _Verb(Enum):
    """What rank 0 has found, or what a worker that gives up writes in its place."""

    ROSTER = "roster"  # the records follow
    MET = "met"  # the endpoints follow
    FAILED = "failed"  # the kind of the error, and its text
    ABANDONED = "abandoned"


@dataclass(frozen=True, slots=True)
class _Finding:
    """A roster, or an outcome."""

    verb: _Verb
    values: Sequence[str] = ()

    def dump(self) -> str:
        return json.dumps([self.verb.value, *self.values])

    @classmethod
    def parse(cls, text: str) -> _Finding:
        """Reads a finding, or raises an AuthenticationError."""
        try:
            verb, *values = map(str, json.loads(text))
            return cls(_Verb(verb), values)
        except (ValueError, TypeError, RecursionError) as error:
            raise AuthenticationError(f"expected a roster, found another entry: {error}") from None

    @classmethod
    def of_error(cls, error: RpcError) -> _Finding:
        """Returns a finding for `error`, which the others raise."""
        known = type(error).__name__ if type(error).__name__ in _KINDS else RpcError.__name__
        return cls(_Verb.FAILED, [known, str(error)])

    def error(self) -> RpcError:
        kind, text = self.values
        return _KINDS.get(kind, RendezvousError)(text)


class _Worker:
    """What rank 0 and the others have in common; one call of `meet`."""

    def __init__(
        self,
        entries: SignedStore,
        record: PeerRecord,
        timeout: float,
        timing: RendezvousTiming,
        place: str,
        listen: Callable[[list[PeerRecord]], str],
    ) -> None:
        self._entries = entries
        self._record = record
        self._deadline = time.monotonic() + timeout
        self._expected = f"expected {record.world_size} workers{place} within {timeout:g} s,"
        self._maybe_another_mesh = (
            f" (or the store{place} is that of another mesh: give each mesh a MASTER_PORT of its "
            "own)"
            if place
            else ""
        )
        self._timing = timing
        self._listen = listen
        self._next_look = 0.0
        self._failure: RpcError | None = None  # why this worker can't listen

    def _endpoint(self, records: list[PeerRecord]) -> str:
        """Listens for the workers of a roster; returns the text of the endpoint's entry."""
        self._failure = None
        try:
            return f"{_LISTENS}{self._listen(records)}"
        except RpcError as error:
            self._failure = error
            return f"{_CAN_NOT}{error}"

    def _decide(self, key: str, finding: _Finding) -> _Finding:
        """Writes a finding unless there is one; returns the one that counts."""
        return _Finding.parse(self._entries.get_or_set(key, finding.dump(), _MAX_ROSTER_BYTES))

    def _is_time_to_look(self, pause: float) -> bool:
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + pause
        return True

    def _unconfirmed(self, prefix: str, records: Iterable[PeerRecord]) -> list[PeerRecord]:
        """Returns those of a roster's workers that have not written their endpoints."""
        others = [record for record in records if record.rank]
        return [each for each in others if not self._entries.check([f"{prefix}/{each.rank}"])]

    def _left(self, records: Iterable[PeerRecord]) -> RendezvousError:
        infos = [record.info for record in records]
        return RendezvousError(
            f"{self._expected} but {infos} left again, do not answer, or are from an earlier run"
            f"{self._maybe_another_mesh}: start them again"
        )


class _Leader(_Worker):
    """Rank 0, which writes the roster."""

    def run(self, check: Callable[[list[PeerRecord]], None]) -> list[PeerRecord]:
        own = self._record
        self._token = own.token
        self._attendance = Attendance(self._entries, own, own.token, range(1, own.world_size))
        # Of a roster that was abandoned: those that had not answered by then.
        self._silent: list[PeerRecord] = []
        self._entries.set(_LEADER, own.dump())
        number = 0
        while (found := self._write_roster(number, check)) is None:
            number += 1
        return found

    def _write_roster(
        self, number: int, check: Callable[[list[PeerRecord]], None]
    ) -> list[PeerRecord] | None:
        """Returns the records of all, with their endpoints; None if there must be another roster.

        If it raises an error, the others know it.
        """
        key = f"roster/{self._token}/{number}"
        try:
            records = self._gather()
            roster = _Finding(_Verb.ROSTER, [record.dump() for record in records])
            self._entries.set(key, roster.dump())
            key = f"outcome/{self._token}/{number}"
            found = self._with_endpoints(number, records)
            _check(found, check)
        except _Again:
            self._decide(key, _Finding(_Verb.ABANDONED))
            return None
        except _Failed as failed:
            self._tell(key, failed.error)
            raise self._failure or failed.error from None
        met = _Finding(_Verb.MET, [record.endpoint for record in found])
        return found if self._decide(key, met).verb is _Verb.MET else None

    def _gather(self) -> list[PeerRecord]:
        """Waits until all have come."""
        attendance, own = self._attendance, self._record
        size = own.world_size
        pause = max(self._timing.look_seconds, self._timing.look_seconds_per_rank * size)
        self._next_look = time.monotonic() + pause

        def complete() -> bool:
            found = attendance.complete()
            if not found and self._is_time_to_look(pause):
                self._look_at_leader()
                attendance.look(attendance.absent)
            if attendance.refused:
                raise _Failed(attendance.mutual_refusal(min(attendance.refused)))
            if found and (misfit := attendance.misfit()) is not None:
                raise _Failed(misfit)
            return found

        if not wait_for(complete, self._deadline):
            attendance.look(attendance.absent)
            why = attendance.incomplete(self._expected, self._maybe_another_mesh)
            if why is None:
                left = [attendance.came[rank].record for rank in attendance.absent]
                why = self._left(self._silent or left)
            raise _Failed(why)
        return [own, *(attendance.came[rank].record for rank in range(1, size))]

    def _with_endpoints(self, number: int, records: list[PeerRecord]) -> list[PeerRecord]:
        """Waits until all have listened."""
        prefix = f"endpoint/{self._token}/{number}"
        keys = [f"{prefix}/{record.rank}" for record in records[1:]]
        texts = [self._endpoint(records)]

        def confirmed() -> bool:
            if not keys or self._entries.check(keys):
                return True
            if self._is_time_to_look(self._timing.look_seconds):
                self._look_at_leader()
                self._silent = self._unconfirmed(prefix, records)
                self._attendance.read([record.rank for record in self._silent])
                waiting = [Arrival(each) for each in self._silent]
                now = map(self._attendance.came.get, (each.rank for each in self._silent))
                if [each and replace(each, before=None) for each in now] != waiting:
                    raise _Again
                if self._entries.check([f"outcome/{self._token}/{number}"]):
                    raise _Again
            return False

        if not wait_for(confirmed, self._deadline):
            raise _Failed(self._left(self._unconfirmed(prefix, records)))
        if keys:
            try:
                texts += self._entries.get_all(keys)
            except AuthenticationError as error:
                raise _Failed(error) from error
        for record, text in zip(records, texts, strict=True):
            if text.startswith(_CAN_NOT):
                raise _Failed(
                    RendezvousError(
                        f"expected all workers to publish where they listen, but {record.info} on "
                        f"{record.host} failed: {text.removeprefix(_CAN_NOT)}"
                    )
                )
        return [
            replace(record, endpoint=text.removeprefix(_LISTENS))
            for record, text in zip(records, texts, strict=True)
        ]

    def _look_at_leader(self) -> None:
        """Raises an error if another worker has taken the place of this one."""
        own = self._record
        try:
            found = _leader_in(self._entries, self._entries.get_raw(_LEADER))
        except (AuthenticationError, ValueError) as error:
            raise AuthenticationError(
                f"the record of worker {own.name} (rank 0) was replaced: {error}"
            ) from error
        if found.token != own.token:
            raise _not_unique(own, found)

    def _tell(self, key: str, error: RpcError) -> None:
        """Writes why there is no mesh, and waits until the others have read that.

        Rank 0 may host the store, and a failure here often ends its program.
        """
        attendance = self._attendance
        readers = {rank for rank, each in attendance.came.items() if not each.left}
        keys = [f"heard/{self._token}/{rank}" for rank in readers.union(attendance.refused)]
        now = time.monotonic()
        overtime = max(self._deadline, now + self._timing.overtime_seconds)
        with contextlib.suppress(RuntimeError, OSError):
            if self._decide(key, _Finding.of_error(error)).verb is _Verb.FAILED and keys:
                until = min(now + self._timing.failure_read_seconds, overtime)
                wait_for(lambda: self._entries.check(keys), until)


class _Guest(_Worker):
    """Another worker than rank 0."""

    def run(self) -> list[PeerRecord]:
        self._leader: PeerRecord | None = None  # as it was found last
        self._over: set[str] = set()  # the tokens of leaders that this worker can't meet
        self._answered: dict[bytes, bool] = {}  # by the entries of leaders that are refused
        self._included = False  # in the present roster
        self._attendance = Attendance(self._entries, self._record, NOBODY, ())
        while True:
            try:
                return self._follow(self._await_leader())
            except _LeaderReplaced:
                pass
            except DistNetworkError as error:
                raise self._store_lost(error) from error

    def _attend(self, leader: PeerRecord | None = None) -> None:
        """Writes this worker's record for a leader, or because there is none."""
        own, refused = self._record, self._attendance.refused
        others = [rank for rank in range(own.world_size) if rank != own.rank]
        token = NOBODY if leader is None else leader.token
        self._attendance = Attendance(self._entries, own, token, others)
        if leader is None:
            self._attendance.refused |= refused
        else:
            self._attendance.came[0] = Arrival(leader)
        self._attendance.arrive()

    def _await_leader(self) -> PeerRecord:
        """Waits for a leader that may be that of this mesh."""
        leader = self._find_leader()
        if leader is None:
            self._attend()

            def found() -> bool:
                nonlocal leader
                leader = self._find_leader()
                return leader is not None

            if not wait_for(found, self._deadline):
                raise self._too_late()
        assert leader is not None
        return leader

    def _find_leader(self) -> PeerRecord | None:
        if not self._entries.check([_LEADER]):
            return None
        entry = self._entries.get_raw(_LEADER)
        try:
            leader = _leader_in(self._entries, entry)
        except (AuthenticationError, ValueError) as error:
            self._refuse_leader(entry, error)
            return None
        self._attendance.refused.pop(0, None)
        self._leader = leader
        return None if leader.token in self._over else leader

    def _refuse_leader(self, entry: bytes, error: Exception) -> None:
        """Answers a leader that this worker refuses, so that both know, if it still waits."""
        self._attendance.refuse(0, error)
        token = claimed_token(entry)
        if not token:
            return
        over = self._entries.check([f"roster/{token}/0"])
        if entry not in self._answered:
            self._answered[entry] = not over
            if not over:
                Attendance(self._entries, self._record, token, ()).arrive()
        elif over and self._answered[entry]:
            self._entries.set(f"heard/{token}/{self._record.rank}", "1")
            raise self._attendance.mutual_refusal(0)

    def _follow(self, leader: PeerRecord) -> list[PeerRecord]:
        """Goes by the rosters of a leader, and their outcomes."""
        token, rank = leader.token, self._record.rank
        late = self._entries.check([f"roster/{token}/0"])
        self._attend(leader)
        self._next_look = time.monotonic() + self._timing.look_seconds
        for number in itertools.count():
            found = self._await(leader, f"roster/{token}/{number}")
            if found.verb is _Verb.ROSTER:
                records = _records(found)
                self._included = self._is_in(records)
                if self._included:
                    endpoint = self._endpoint(records)
                    self._entries.set(f"endpoint/{token}/{number}/{rank}", endpoint)
                found = self._await(leader, f"outcome/{token}/{number}")
                if self._included and found.verb is _Verb.MET:
                    pairs = zip(records, found.values, strict=True)
                    return [replace(record, endpoint=endpoint) for record, endpoint in pairs]
            if found.verb is _Verb.FAILED and (self._included or not late):
                self._entries.set(f"heard/{token}/{rank}", "1")
                raise self._failure or found.error()
            if found.verb is not _Verb.ABANDONED:  # that of an earlier mesh, or of another one
                self._over.add(token)
                raise _LeaderReplaced
            self._included = False
        raise AssertionError

    def _is_in(self, records: Sequence[PeerRecord]) -> bool:
        """Whether a roster has this worker; it may have come after it was written.

        Raises:
            RendezvousError: another worker of this rank has come later.
        """
        own, attendance = self._record, self._attendance
        if own in records:
            return True
        attendance.read([own.rank])
        if own.rank in attendance.refused:
            raise attendance.mutual_refusal(own.rank)
        last = attendance.came.pop(own.rank).record
        if last != own:
            raise _not_unique(own, last)
        return False

    def _await(self, leader: PeerRecord, key: str) -> _Finding:
        """Waits for an entry of the leader; writes that this worker gives up if it comes too late.

        Raises:
            _LeaderReplaced: there is another leader.
            RendezvousError: it is too late.
        """

        def written() -> bool:
            if self._entries.check([key]):
                return True
            if self._is_time_to_look(self._timing.look_seconds):
                found = self._find_leader()
                if found is not None and found.token != leader.token:
                    raise _LeaderReplaced
            return False

        error: Exception
        try:
            if wait_for(written, self._deadline):
                entry = self._entries.get_raw(key)
                return _Finding.parse(self._entries.verified(key, entry, _MAX_ROSTER_BYTES))
            error = self._too_late()
        except _LeaderReplaced as replaced:
            error = replaced
        if self._included:
            found = self._decide(key, _Finding(_Verb.ABANDONED))
            if found.verb is not _Verb.ABANDONED:
                return found
            self._included = False
        self._attendance.leave()
        raise error

    def _too_late(self) -> RpcError:
        """Returns why there is no mesh at the deadline."""
        leader, attendance = self._leader, self._attendance
        if leader is not None and leader.token in self._over:
            mismatch = leader.mismatch(self._record)
            return RendezvousError(mismatch) if mismatch else self._left([leader])
        attendance.look(attendance.absent)
        why = attendance.incomplete(self._expected, self._maybe_another_mesh)
        return why or self._left([leader] if leader else [])

    def _store_lost(self, error: Exception) -> RpcError:
        """Returns the error for a lost store, with what explains more than that."""
        if self._included:
            assert self._leader is not None
            return RendezvousError(
                f"expected all {self._record.world_size} workers to go on together once they had "
                f"met, but lost their store ({error}): its host has exited, which is "
                f"{self._leader.info}, or the launcher if that hosts it; find out why it exited"
            )
        attendance = self._attendance
        why: object = attendance.misfit()
        if attendance.refused:
            why = attendance.describe_refused(self._expected, self._maybe_another_mesh)
        if why is None:
            raise error
        return StoreLost(f"{why}; then the store was lost: {error}")


def wait_for(done: Callable[[], bool], deadline: float) -> bool:
    """Waits until ``done()``; returns False at the deadline.

    Raises:
        RendezvousError: the launcher stops all workers.
    """
    pause, longest = _PAUSE_SECONDS
    while not done():
        if time.monotonic() > deadline:
            return False
        if (error := stop_error()) is not None:
            raise error
        time.sleep(pause)
        pause = min(2 * pause, longest)
    return True


def _leader_in(entries: SignedStore, entry: bytes) -> PeerRecord:
    return PeerRecord.parse(entries.verified(_LEADER, entry))


def _records(roster: _Finding) -> list[PeerRecord]:
    try:
        return [PeerRecord.parse(text) for text in roster.values]
    except ValueError as error:
        raise AuthenticationError(f"expected a roster, found another entry: {error}") from None


def _not_unique(own: PeerRecord, other: PeerRecord) -> RendezvousError:
    places = describe_places([own, other])
    return RendezvousError(f"rank {own.rank} is not unique: workers {places} both have it")


def _check(records: list[PeerRecord], check: Callable[[list[PeerRecord]], None]) -> None:
    """Raises a _Failed if these workers can't form a mesh."""
    by_name: dict[str, PeerRecord] = {}
    for record in records:
        other = by_name.setdefault(record.name, record)
        if other is not record:
            raise _Failed(
                RendezvousError(
                    f"worker name {record.name} is not unique: ranks {other.rank} and "
                    f"{record.rank} both have it"
                )
            )
    try:
        check(records)
    except RpcError as error:
        raise _Failed(error) from error

"""How the workers of a mesh find each other: over any ``torch.distributed.Store``.

Each worker writes a peer record under its rank and reads the records of all others. A record can be
stale: a store may outlive a mesh (torchrun's does, a file may), and any worker may try again after
a failure. So the workers then confirm that they have seen the same records. Each writes a key that
is named by the tokens of all records. A record that is replaced meanwhile is read again.

A worker that has confirmed may give up before the last one confirms: its time is over, or a record
was replaced. So the workers also agree on the outcome. The first that sees all confirmations writes
"met", and one that gives up writes "abandoned", each only if nothing is written yet (an atomic
compare_set). All go by what is written then: a mesh stands for all of its workers or for none.

Rank 0, which may host the store, is the first to confirm. A worker that loses the store can
therefore tell two cases apart. If rank 0 had confirmed, this was the store of its own mesh, which
rank 0 joined and has left again. If not, it may have been the store of an earlier mesh, whose host
had yet to close it.

All entries are signed with the cluster secret (``zrpc.membership.signed_store``). A signature shows
which mesh's worker wrote a record but not when, so anybody who can write to the store can put an
old one there. It is treated as a stale one: its token is not of this run, so no worker confirms it,
since a confirmation is signed together with all tokens. A record with another signature is refused.
A worker that finds one leaves a *protest* for its author, which reads it if it can: then both know.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch.distributed import DistNetworkError, Store, TCPStore

from zrpc.errors import AuthenticationError, RendezvousError, RpcError
from zrpc.membership.launch_stop import stop_error
from zrpc.membership.missing_ranks import describe_hosts, describe_places, describe_refused
from zrpc.membership.peer_record import PeerRecord, claimed_token
from zrpc.membership.same_rank import SameRank
from zrpc.membership.secret import ClusterSecret
from zrpc.membership.signed_store import SignedStore

__all__ = [
    "TIMING",
    "RendezvousTiming",
    "StoreLost",
    "await_readers",
    "digest_of",
    "meet",
    "store_errors",
    "wait_for",
]

logger = logging.getLogger(__name__)

# The store is polled with a pause that grows from the first number to the second. Its own wait()
# would be an event to await, but Ctrl-C does not end it, TCPStore logs each timeout of it as a
# network error, and FileStore's polls once a second.
_PAUSE_SECONDS = (0.001, 0.05)
# What the workers agree on, see above.
_MET = "met"
_ABANDONED = "abandoned"


@dataclass(frozen=True, slots=True)
class RendezvousTiming:
    """The times of a rendezvous."""

    # How long rank 0 stays at most for the others to read why there is no mesh; one of them may
    # have died.
    failure_read_seconds: float = 5.0
    # How often a worker reads the records that exist while others are missing.
    present_check_seconds: float = 0.5
    # The shortest time between two reads of the records of all ranks, for each rank: every worker
    # reads them, so that the store has a limited number of requests in a large mesh too.
    read_seconds_per_rank: float = 0.02


TIMING = RendezvousTiming()


class StoreLost(RendezvousError):
    """The connection to the store was lost before its mesh stood; it may be an earlier mesh's."""


def meet(
    store: Store,
    record: PeerRecord,
    timeout: float,
    secret: ClusterSecret | None = None,
    timing: RendezvousTiming = TIMING,
    check: Callable[[list[PeerRecord]], None] = lambda _: None,
) -> list[PeerRecord]:
    """Exchanges peer records with all other ranks; returns those of all, by rank.

    Args:
        store: shared by all.
        record: this worker's.
        timeout: seconds.
        secret: signs the records.
        timing: the times of this rendezvous.
        check: raises an RpcError if these workers can't form a mesh, and all of them find that.

    Raises:
        RendezvousError: ranks are missing when the timeout passes; two workers have one name
            or one rank; the world sizes differ; the store fails.
        StoreLost: the store is gone, and rank 0 had not confirmed this worker's record in it.
        AuthenticationError: workers have different secrets, or only some have one; an entry in the
            store is not from one of them.
    """
    place = f" at {store.host}:{store.port}" if isinstance(store, TCPStore) else ""
    with SignedStore(store, secret, time.monotonic() + timeout) as entries, store_errors():
        return _Rendezvous(entries, record, timeout, timing, place).run(check)


@contextlib.contextmanager
def store_errors(met: Sequence[PeerRecord] = ()) -> Iterator[None]:
    """Raises a RendezvousError if a store fails while workers meet in it, or after they have."""
    try:
        yield
    except RpcError:
        raise
    except (RuntimeError, OSError) as error:
        if met:
            raise _host_ended(met, error) from error
        kind = StoreLost if isinstance(error, DistNetworkError) else RendezvousError
        raise kind(
            f"the store failed while the workers were meeting: {error}. If its host (rank 0, or "
            "the launcher) has exited, its own error says why"
        ) from error


def _host_ended(records: Sequence[PeerRecord], error: Exception) -> RendezvousError:
    host = records[0].info
    return RendezvousError(
        f"expected all {len(records)} workers to go on together once they had met, but lost their "
        f"store ({error}): its host has exited, which is {host}, or the launcher if that hosts it; "
        "find out why it exited"
    )


class _Rendezvous:
    """One call of `meet`."""

    def __init__(
        self,
        entries: SignedStore,
        record: PeerRecord,
        timeout: float,
        timing: RendezvousTiming,
        place: str,
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
        self._keys = [f"record/{rank}" for rank in range(record.world_size)]
        # What is in place of a record, by rank: the entry, and what is wrong with it.
        self._refused: dict[int, tuple[bytes, Exception]] = {}
        self._next_read = 0.0
        self._came: set[int] = set()  # ranks whose records were found while others were missing
        # What is wrong with a record that was found meanwhile; it may be of an earlier run.
        self._mismatch: str | None = None
        self._same_rank = SameRank(entries, record, self._read_present)

    def run(self, check: Callable[[list[PeerRecord]], None]) -> list[PeerRecord]:
        self._entries.set(self._keys[self._record.rank], self._record.dump())
        while True:
            records = self._gather()
            digest = digest_of(records)
            if self._confirmed(digest, records):
                try:
                    _check(records, self._record)
                    check(records)
                except RpcError:
                    self._shorten_deadline(self._timing.failure_read_seconds)
                    await_readers(self._entries, records, self._record.rank, self._deadline)
                    raise
                return records
            self._await_change(records)

    def _gather(self) -> list[PeerRecord]:
        """Waits until there is a record of each rank."""
        records: list[PeerRecord] = []

        def complete() -> bool:
            absent = self._absent
            # The first one alone is asked for most of the time, as a request names each key.
            if not absent or (self._check(absent[:1]) and self._check(absent)):
                records[:] = self._read_records()
            elif self._may_read(self._timing.present_check_seconds):
                present = self._read_present(absent)
                self._came |= {record.rank for record in present}
                mismatches = (record.size_mismatch(self._record) for record in present)
                self._mismatch = next(filter(None, mismatches), self._mismatch)
                self._same_rank.look()
            return len(records) == len(self._keys)

        try:
            if not wait_for(complete, self._deadline):
                raise self._incomplete()
        except DistNetworkError as error:
            why = self._mismatch
            # Its host may have waited in vain for the same ranks, and for less time.
            missing = set(self._absent).difference(self._refused)
            if why is None and self._came and missing:
                why = f"{self._expected} but {self._same_rank.describe(missing)}"
            if why is None and self._refused:
                why = self._refusal()
            if why is None:
                raise
            raise StoreLost(f"{why}; then the store was lost: {error}") from error
        self._mismatch = None
        return records

    def _read_records(self) -> list[PeerRecord]:
        """Returns the records of all ranks, without the refused ones."""
        entries = self._entries.get_all_raw(self._keys)
        found = [self._read(rank, entry) for rank, entry in enumerate(entries)]
        mine = found[self._record.rank]
        if mine is None:
            raise AuthenticationError(
                f"the record of worker {self._record.name} (rank {self._record.rank}) was "
                f"replaced: {self._refused[self._record.rank][1]}"
            )
        if mine != self._record:
            raise RendezvousError(
                f"rank {mine.rank} is not unique: workers "
                f"{describe_places([self._record, mine])} both have it"
            )
        return [record for record in found if record is not None]

    @property
    def _absent(self) -> list[int]:
        """The ranks of which no valid record was found yet."""
        return [rank for rank in range(len(self._keys)) if rank not in self._came]

    def _may_read(self, pause: float = 0.0) -> bool:
        """Whether it is time to read the records of all ranks again; then the next time is set."""
        if time.monotonic() < self._next_read:
            return False
        pause = max(pause, self._timing.read_seconds_per_rank * len(self._keys))
        self._next_read = time.monotonic() + pause
        return True

    def _check(self, ranks: Iterable[int]) -> bool:
        """Whether there is an entry for each of these ranks."""
        return self._entries.check([self._keys[rank] for rank in ranks])

    def _read_present(self, ranks: Sequence[int]) -> list[PeerRecord]:
        """Returns the valid records of some ranks."""
        present = [rank for rank in ranks if self._check([rank])]
        entries = self._entries.get_all_raw([self._keys[rank] for rank in present])
        found = [self._read(*pair) for pair in zip(present, entries, strict=True)]
        return [record for record in found if record is not None]

    def _read(self, rank: int, entry: bytes) -> PeerRecord | None:
        """Returns the record in an entry; None, after a protest, if it isn't a member's."""
        try:
            record = PeerRecord.parse(self._entries.verified(self._keys[rank], entry))
            if record.member_id != rank:
                raise ValueError(
                    f"expected the record of rank {rank}, found that of {record.member_id}"
                )
        except (AuthenticationError, ValueError) as error:
            self._refuse(rank, entry, error)
            return None
        self._refused.pop(rank, None)
        return record

    def _refuse(self, rank: int, entry: bytes, error: Exception) -> None:
        token = claimed_token(entry)
        if rank not in self._refused or self._refused[rank][0] != entry:
            self._refused[rank] = entry, error
            logger.warning(
                "%s refuses what claims to be worker %d: %s", self._record.info, rank, error
            )
            if token:
                self._entries.set(_protest_key(token, self._record.token), "refused")
        if token and self._entries.check([_protest_key(self._record.token, token)]):
            # For the other worker to read the protest too: this one may be the host.
            self._shorten_deadline(self._timing.failure_read_seconds)
            heard = [f"heard/{token}/{self._record.token}"]
            _announce(self._entries, f"heard/{self._record.token}/{token}", heard, self._deadline)
            raise AuthenticationError(
                f"worker {self._record.name} (rank {self._record.rank}) and the worker of rank "
                f"{rank} refuse each other: {error}"
            )

    def _confirmed(self, digest: str, records: list[PeerRecord]) -> bool:
        """Confirms these records after rank 0, and waits until all have.

        Returns False if a record was replaced, or others have abandoned the records.

        Raises:
            RendezvousError: some did not in time; the store is gone, and rank 0 had confirmed.
        """
        keys = {f"{digest}/{record.rank}": record for record in records}
        first, mine = f"{digest}/0", f"{digest}/{self._record.rank}"
        if mine != first and not self._all_see({first: keys.pop(first)}, records):
            return False
        try:
            self._entries.set(mine, "seen")
            del keys[mine]
            return self._all_go_on(digest, keys, records)
        except DistNetworkError as error:
            if mine == first:
                raise
            raise _host_ended(records, error) from error

    def _all_go_on(
        self, digest: str, keys: dict[str, PeerRecord], records: list[PeerRecord]
    ) -> bool:
        """Waits until the others have confirmed, and agrees with all on whether they have met.

        Raises as `_all_see`, unless another worker saw in time that all had confirmed.
        """
        outcome = f"{digest}/outcome"
        try:
            # Of one worker nobody else has to confirm.
            met = not keys or self._all_see(keys, records)
        except (RendezvousError, AuthenticationError) as error:
            agreed = self._entries.get_or_set(outcome, _ABANDONED)
            if agreed == _ABANDONED or isinstance(error, AuthenticationError):
                raise
            return True
        return self._entries.get_or_set(outcome, _MET if met else _ABANDONED) == _MET

    def _await_change(self, records: list[PeerRecord]) -> None:
        """Waits until a record is replaced, after others have abandoned these."""
        if not wait_for(
            lambda: self._may_read() and self._read_records() != records, self._deadline
        ):
            raise RendezvousError(
                f"{self._expected} but some of them left again, or are from an earlier run"
                f"{self._maybe_another_mesh}: start them again"
            )

    def _all_see(self, keys: dict[str, PeerRecord], records: list[PeerRecord]) -> bool:
        """Waits until some workers have confirmed the records; returns False if one changed."""
        replaced = False

        def seen() -> bool:
            nonlocal replaced
            if self._entries.check(list(keys)):
                return True
            replaced = self._may_read() and self._read_records() != records
            return replaced

        if wait_for(seen, self._deadline):
            if not replaced:
                # It refuses a confirmation that its rank has not written.
                self._entries.get_all(list(keys))
            return not replaced
        _check(records, self._record)
        late = [record.info for key, record in keys.items() if not self._entries.check([key])]
        raise RendezvousError(
            f"{self._expected} but {late} left again, or are from an earlier run"
            f"{self._maybe_another_mesh}: start them again"
        )

    def _incomplete(self) -> RendezvousError | AuthenticationError:
        records = self._read_present(range(len(self._keys)))
        for record in records:
            if (mismatch := record.size_mismatch(self._record)) is not None:
                return RendezvousError(mismatch)
        if self._refused:
            return AuthenticationError(self._refusal())
        missing = set(range(len(self._keys))) - {record.rank for record in records}
        self._same_rank.look()
        return RendezvousError(
            f"{self._expected} but {self._same_rank.describe(missing)}; {describe_hosts(records)}"
        )

    def _refusal(self) -> str:
        errors = {rank: error for rank, (_, error) in self._refused.items()}
        return f"{self._expected} but {describe_refused(errors, self._maybe_another_mesh)}"

    def _shorten_deadline(self, seconds: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + seconds)


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


def _protest_key(against: str, by: str) -> str:
    return f"protest/{against}/{by}"


def digest_of(records: Iterable[PeerRecord]) -> str:
    """Returns what stands for these records in the store's keys."""
    return hashlib.sha256("".join(record.dump() for record in records).encode()).hexdigest()


def _check(records: list[PeerRecord], mine: PeerRecord) -> None:
    by_name: dict[str, PeerRecord] = {}
    for record in records:
        if (mismatch := record.size_mismatch(mine)) is not None:
            raise RendezvousError(mismatch)
        other = by_name.setdefault(record.name, record)
        if other is not record:
            raise RendezvousError(
                f"worker name {record.name} is not unique: ranks {other.rank} and {record.rank} "
                "both have it"
            )


def await_readers(
    entries: SignedStore, records: Sequence[PeerRecord], own_rank: int, deadline: float
) -> None:
    """Announces that this worker knows why there is no mesh; rank 0 waits for all to know.

    Rank 0 may host the store, and a failure here often ends its program.
    """
    digest = digest_of(records)
    keys = [f"{digest}/{record.rank}/refused" for record in records]
    _announce(entries, keys[own_rank], () if own_rank else keys, deadline)


def _announce(entries: SignedStore, key: str, awaited: Sequence[str], deadline: float) -> None:
    """Writes an entry; then waits until there are others, unless the store is gone."""
    with contextlib.suppress(RuntimeError, OSError):
        entries.set(key, "1")
        wait_for(lambda: not awaited or entries.check(awaited), deadline)

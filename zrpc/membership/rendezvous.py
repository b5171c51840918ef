"""How the workers of a mesh find each other: over any ``torch.distributed.Store``.

Each worker writes a peer record under its rank and reads the records of all others. A record can be
stale: a store may outlive a mesh (torchrun's does, a file may), and any worker may try again after
a failure. So the workers then confirm that they have seen the same records. Each writes a key that
is named by the tokens of all records. A record that is replaced meanwhile is read again.

A worker listens for the others before it confirms, once it knows from their records who they are.
Its confirmation says where it can be reached by TCP, or why it can't be.

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
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch.distributed import DistNetworkError, Store, TCPStore

from zrpc.errors import AuthenticationError, RendezvousError, RpcError
from zrpc.membership.missing_ranks import describe_hosts
from zrpc.membership.peer_record import PeerRecord
from zrpc.membership.record_reader import RecordReader, announce, wait_for
from zrpc.membership.secret import ClusterSecret
from zrpc.membership.signed_store import SignedStore

__all__ = [
    "TIMING",
    "RendezvousTiming",
    "StoreLost",
    "digest_of",
    "meet",
    "store_errors",
]

# What the workers agree on, see above.
_MET = "met"
_ABANDONED = "abandoned"
# What a confirmation begins with: the worker's endpoint follows, or the reason why it has none.
_LISTENS = "="
_FAILED = "!"


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


class _Changed(Exception):
    """A record was replaced, or others have abandoned the records."""


def meet(
    store: Store,
    record: PeerRecord,
    timeout: float,
    secret: ClusterSecret | None = None,
    timing: RendezvousTiming = TIMING,
    listen: Callable[[list[PeerRecord]], str] = lambda _: "",
    check: Callable[[list[PeerRecord]], None] = lambda _: None,
) -> list[PeerRecord]:
    """Exchanges peer records with all other ranks; returns those of all, with their endpoints.

    Args:
        store: shared by all.
        record: this worker's.
        timeout: seconds.
        secret: signs the records.
        timing: the times of this rendezvous.
        listen: gets the records of all and returns this worker's endpoint for TCP, empty if it
            needs none. If it raises an RpcError, no worker joins. It is called again if a record is
            replaced.
        check: raises an RpcError if these workers can't form a mesh, and all of them find that.

    Raises:
        RendezvousError: ranks are missing when the timeout passes; two workers have one name
            or one rank; the world sizes differ; a worker can't listen; the store fails.
        StoreLost: the store is gone, and rank 0 had not confirmed this worker's record in it.
        AuthenticationError: workers have different secrets, or only some have one; an entry in the
            store is not from one of them.
    """
    place = f" at {store.host}:{store.port}" if isinstance(store, TCPStore) else ""
    entries = SignedStore(store, secret, time.monotonic() + timeout)
    with store_errors():
        return _Rendezvous(entries, record, timeout, timing, place, listen).run(check)


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
        self._reader = RecordReader(entries, record, self._deadline, timing.failure_read_seconds)
        self._next_read = 0.0
        # By rank, found while others were missing; some may be of an earlier run.
        self._came: dict[int, PeerRecord] = {}
        self._listen = listen
        # The confirmations of the present records by their keys, and why this worker can't listen.
        self._confirmations: dict[str, str] = {}
        self._failure: RpcError | None = None

    def run(self, check: Callable[[list[PeerRecord]], None]) -> list[PeerRecord]:
        self._reader.write_own()
        while True:
            records = self._gather()
            digest = digest_of(records)
            try:
                self._confirm(digest, records)
                break
            except _Changed:
                self._await_change(records)
        try:
            _check(records, self._record)
            if self._failure is not None:
                raise self._failure
            found = [self._with_endpoint(digest, record) for record in records]
            check(found)
        except RpcError:
            self._deadline = min(
                self._deadline, time.monotonic() + self._timing.failure_read_seconds
            )
            self._await_readers(digest)
            raise
        return found

    def _with_endpoint(self, digest: str, record: PeerRecord) -> PeerRecord:
        text = self._confirmations[f"{digest}/{record.rank}"]
        if text.startswith(_FAILED):
            raise RendezvousError(
                f"expected all workers to publish where they listen, but {record.info} on "
                f"{record.host} failed: {text.removeprefix(_FAILED)}"
            )
        return replace(record, endpoint=text.removeprefix(_LISTENS))

    def _gather(self) -> list[PeerRecord]:
        """Waits until there is a record of each rank."""
        records: list[PeerRecord] = []

        def complete() -> bool:
            absent = self._absent
            # The first one alone is asked for most of the time, as a request names each key.
            if not absent or (self._reader.exist(absent[:1]) and self._reader.exist(absent)):
                records[:] = self._reader.all()
            elif self._may_read(self._timing.present_check_seconds):
                self._came |= {record.rank: record for record in self._reader.present(absent)}
                self._reader.look_for_same_rank()
            return len(records) == self._record.world_size

        try:
            if not self._wait_for(complete):
                raise self._incomplete()
        except DistNetworkError as error:
            # Its host may have waited in vain for the same ranks, and for less time.
            missing = set(self._absent).difference(self._reader.refused)
            why = self._mismatch(self._came.values())
            if why is None and self._came and missing:
                why = f"{self._expected} but {self._reader.describe_missing(missing)}"
            if why is None and self._reader.refused:
                why = self._refusal
            if why is None:
                raise
            raise StoreLost(f"{why}; then the store was lost: {error}") from error
        self._came = {record.rank: record for record in records}
        return records

    @property
    def _absent(self) -> list[int]:
        """The ranks without a valid record so far."""
        return [rank for rank in range(self._record.world_size) if rank not in self._came]

    def _may_read(self, pause: float = 0.0) -> bool:
        """Whether it is time to read the records of all ranks again; then the next time is set."""
        if time.monotonic() < self._next_read:
            return False
        pause = max(pause, self._timing.read_seconds_per_rank * self._record.world_size)
        self._next_read = time.monotonic() + pause
        return True

    def _confirm(self, digest: str, records: list[PeerRecord]) -> None:
        """Confirms these records after rank 0, and waits until all have.

        Raises:
            _Changed: a record was replaced, or others have abandoned the records.
            RendezvousError: some did not in time; the store is gone, and rank 0 had confirmed.
        """
        self._confirmations, self._failure = {}, None
        keys = {f"{digest}/{record.rank}": record for record in records}
        first, mine = f"{digest}/0", f"{digest}/{self._record.rank}"
        if mine != first:
            self._await_all({first: keys.pop(first)}, records)
        try:
            own = f"{_LISTENS}{self._listen(records)}"
        except RpcError as error:
            self._failure, own = error, f"{_FAILED}{error}"
        try:
            self._entries.set(mine, own)
            self._confirmations[mine] = own
            del keys[mine]
            self._agree(digest, keys, records)
        except DistNetworkError as error:
            if mine == first:
                raise
            raise _host_ended(records, error) from error

    def _agree(self, digest: str, keys: dict[str, PeerRecord], records: list[PeerRecord]) -> None:
        """Waits until the others have confirmed, and agrees with all on whether they have met.

        Raises as `_await_all`, unless another worker saw in time that all had confirmed.
        """
        outcome = f"{digest}/outcome"
        try:
            if keys:  # of one worker nobody else has to confirm
                self._await_all(keys, records)
        except (_Changed, RendezvousError, AuthenticationError) as error:
            agreed = self._entries.get_or_set(outcome, _ABANDONED)
            if agreed == _ABANDONED or isinstance(error, AuthenticationError):
                raise
            self._read_confirmations(keys)  # another worker has seen all of them
        else:
            if self._entries.get_or_set(outcome, _MET) == _ABANDONED:
                raise _Changed

    def _await_change(self, records: list[PeerRecord]) -> None:
        """Waits until a record is replaced, after others have abandoned these."""
        if not self._wait_for(lambda: self._may_read() and self._reader.all() != records):
            raise RendezvousError(
                f"{self._expected} but some of them left again, or are from an earlier run"
                f"{self._maybe_another_mesh}: start them again"
            )

    def _await_all(self, keys: dict[str, PeerRecord], records: list[PeerRecord]) -> None:
        """Waits until some workers have confirmed the records, and reads that."""

        def seen() -> bool:
            if self._entries.check(list(keys)):
                return True
            if self._may_read() and self._reader.all() != records:
                raise _Changed
            return False

        if self._wait_for(seen):
            self._read_confirmations(keys)
            return
        _check(records, self._record)
        late = [record.info for key, record in keys.items() if not self._entries.check([key])]
        raise RendezvousError(
            f"{self._expected} but {late} left again, or are from an earlier run"
            f"{self._maybe_another_mesh}: start them again"
        )

    def _read_confirmations(self, keys: Iterable[str]) -> None:
        """Reads confirmations that exist; refuses one that its rank has not written."""
        names = list(keys)
        self._confirmations |= zip(names, self._entries.get_all(names), strict=True)

    def _incomplete(self) -> RendezvousError | AuthenticationError:
        records = self._reader.present(range(self._record.world_size))
        if (mismatch := self._mismatch(records)) is not None:
            return RendezvousError(mismatch)
        if self._reader.refused:
            return AuthenticationError(self._refusal)
        missing = set(range(self._record.world_size)) - {record.rank for record in records}
        self._reader.look_for_same_rank()
        why = self._reader.describe_missing(missing)
        return RendezvousError(f"{self._expected} but {why}; {describe_hosts(records)}")

    def _mismatch(self, records: Iterable[PeerRecord]) -> str | None:
        """Returns what is wrong with the first record that does not fit this worker's."""
        return next(filter(None, (each.size_mismatch(self._record) for each in records)), None)

    @property
    def _refusal(self) -> str:
        return f"{self._expected} {self._reader.refusal(self._maybe_another_mesh)}"

    def _await_readers(self, digest: str) -> None:
        """Announces that this worker knows why there is no mesh; rank 0 waits for all to know.

        Rank 0 may host the store, and a failure here often ends its program.
        """
        keys = [f"{digest}/{rank}/refused" for rank in range(self._record.world_size)]
        own = keys[self._record.rank]
        announce(self._entries, own, () if self._record.rank else keys, self._deadline)

    def _wait_for(self, done: Callable[[], bool]) -> bool:
        return wait_for(done, self._deadline)


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

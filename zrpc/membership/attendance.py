"""Which workers have come to meet one rank 0: their records in the store.

The key of a record names the token of the rank 0 that its worker has found, and a worker that has
found none writes it under `NOBODY`. A record with a wrong signature is refused.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zrpc.errors import AuthenticationError, RendezvousError, RpcError
from zrpc.membership.missing_ranks import (
    describe_hosts,
    describe_missing,
    describe_places,
    rank_ranges,
)
from zrpc.membership.peer_record import PeerRecord, is_token
from zrpc.membership.signed_store import SignedStore

__all__ = ["NOBODY", "Arrival", "Attendance", "claimed_token"]

logger = logging.getLogger(__name__)

NOBODY = "-"  # in place of the token of rank 0


@dataclass(frozen=True, slots=True)
class Arrival:
    """The last worker that has come as one rank."""

    record: PeerRecord
    before: PeerRecord | None = None  # that of the worker in whose place it has come
    left: bool = False  # it waits no longer

    def dump(self) -> str:
        """Returns the arrival as text."""
        before = None if self.before is None else self.before.dump()
        return json.dumps([self.record.dump(), before, self.left])

    @classmethod
    def parse(cls, text: str) -> Arrival:
        """Reads what `dump` has returned, or raises a ValueError."""
        try:
            record, before, left = json.loads(text)
        except (ValueError, TypeError, RecursionError):
            raise ValueError("expected the record of a worker, found something else") from None
        parsed = None if before is None else PeerRecord.parse(before)
        return cls(PeerRecord.parse(record), parsed, bool(left))


class Attendance:
    """The records of the workers that have come to meet one rank 0.

    Args:
        entries: where the workers meet.
        own: this worker's record.
        token: that of rank 0; `NOBODY` if this worker has found none.
        others: the ranks whose records are read.

    Attributes:
        came: by rank, as they were read last.
        refused: by rank, what is wrong with an entry in place of a record.
    """

    def __init__(
        self, entries: SignedStore, own: PeerRecord, token: str, others: Sequence[int]
    ) -> None:
        self.came: dict[int, Arrival] = {}
        self.refused: dict[int, Exception] = {}
        self._entries = entries
        self._own = own
        self._token = token
        self._others = others

    def key(self, rank: int) -> str:
        """Returns the key of a worker's record."""
        return f"record/{self._token}/{rank}"

    def arrive(self) -> None:
        """Writes this worker's record, in place of that of another worker of its rank."""
        key, text = self.key(self._own.rank), Arrival(self._own).dump()
        if self._entries.claim(key, text):
            return
        self._read_entry(self._own.rank, self._entries.get_raw(key))
        other = self.came.get(self._own.rank)
        if other is not None and not other.left:
            text = Arrival(self._own, other.record).dump()
        self._entries.set(key, text)

    def leave(self) -> None:
        """Writes that this worker waits no longer."""
        self._entries.set(self.key(self._own.rank), Arrival(self._own, left=True).dump())

    @property
    def absent(self) -> list[int]:
        """The ranks without a worker that waits, as was read last."""
        waiting = [rank for rank, arrival in self.came.items() if not arrival.left]
        return sorted(set(self._others).difference(waiting))

    def complete(self) -> bool:
        """Reads the records once there is one for each rank; returns whether all workers wait."""
        absent = self.absent
        keys = [self.key(rank) for rank in absent]
        # The first one alone is asked for most of the time, as a request names each key.
        if keys and not (self._entries.check(keys[:1]) and self._entries.check(keys)):
            return False
        self.read(absent)
        if not self.absent:
            self.read(self._others)  # those read before may have been replaced since
        return not self.absent

    def look(self, ranks: Iterable[int]) -> None:
        """Reads the records of those of some ranks that have come."""
        self.read([rank for rank in ranks if self._entries.check([self.key(rank)])])

    def read(self, ranks: Sequence[int]) -> None:
        """Reads the records of some ranks, which exist."""
        if ranks:
            entries = self._entries.get_all_raw([self.key(rank) for rank in ranks])
            for rank, entry in zip(ranks, entries, strict=True):
                self._read_entry(rank, entry)

    def _read_entry(self, rank: int, entry: bytes) -> None:
        try:
            arrival = Arrival.parse(self._entries.verified(self.key(rank), entry))
            if arrival.record.rank != rank:
                raise ValueError(
                    f"expected the record of rank {rank}, found that of {arrival.record.rank}"
                )
        except (AuthenticationError, ValueError) as error:
            self.refuse(rank, error)
            return
        self.refused.pop(rank, None)
        self.came[rank] = arrival

    def refuse(self, rank: int, error: Exception) -> None:
        """Notes, and logs once, what is wrong with an entry."""
        if str(self.refused.get(rank)) != str(error):
            logger.warning(
                "%s refuses what claims to be worker %d: %s", self._own.info, rank, error
            )
        self.refused[rank] = error
        self.came.pop(rank, None)

    def mutual_refusal(self, rank: int) -> RpcError:
        """Returns the error for a worker that this one has refused, and that knows it."""
        error = self.refused[rank]
        kind = AuthenticationError if isinstance(error, AuthenticationError) else RendezvousError
        own = self._own
        return kind(
            f"worker {own.name} (rank {own.rank}) and the worker of rank {rank} refuse each "
            f"other: {error}"
        )

    def misfit(self) -> RpcError | None:
        """Returns why this worker and one that has come can't be in one mesh; None if they can."""
        for arrival in self.came.values():
            if (mismatch := arrival.record.mismatch(self._own)) is not None:
                return RendezvousError(mismatch)
        return None

    def describe_refused(self, expected: str, note: str) -> AuthenticationError:
        """Returns which records were refused, with a note, and why the first of them was."""
        rank, error = next(iter(self.refused.items()))
        ranks = f"rank{'s' if len(self.refused) > 1 else ''} {rank_ranges(self.refused)}"
        return AuthenticationError(
            f"{expected} but what claims to be {ranks} was refused{note}. Rank {rank}: {error}"
        )

    def incomplete(self, expected: str, note: str) -> RpcError | None:
        """Returns why there is no mesh at the deadline; None if no rank is missing.

        Args:
            expected: the beginning of the text.
            note: what else may be the reason if a record was refused.
        """
        if (misfit := self.misfit()) is not None:
            return misfit
        if self.refused:
            return self.describe_refused(expected, note)
        missing = set(self._others).difference(self.came)
        if not missing:
            return None
        came = [arrival.record for arrival in self.came.values()]
        why = describe_missing(missing)
        for arrival in self.came.values():
            if arrival.before is not None:
                places = describe_places([arrival.before, arrival.record])
                why = f"rank {arrival.record.rank} came twice, from {places}, and {why}"
                break
        hosts = describe_hosts({record.token: record for record in [self._own, *came]}.values())
        return RendezvousError(f"{expected} but {why}; {hosts}")


def claimed_token(entry: bytes) -> str:
    """Returns the token in a record whose signature was refused; empty if there is none."""
    try:
        token = str(json.loads(entry.partition(b" ")[2])["token"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""
    return token if is_token(token) else ""

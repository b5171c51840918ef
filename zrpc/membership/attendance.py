"""Which workers have come to meet one rank 0: their records in the store.

The key of a record names the token of the rank 0 that its worker has found, and a worker that has
found none writes it under `NOBODY`. A record with a wrong signature is refused.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zrpc.errors import AuthenticationError, RendezvousError, RpcError
from zrpc.membership.missing_ranks import describe_hosts, describe_missing, describe_places
from zrpc.membership.peer_record import PeerRecord, is_token
from zrpc.membership.signed_store import SignedStore

logger = logging.getLogger(__name__)

NOBODY = "-"  # in place of the token of rank 0


@dataclass(frozen=True, slots=True)
class Arrival:
    """What the last worker that has come as one rank has written."""

    record: PeerRecord
    before: PeerRecord | None = None  # that of the worker in whose place it has come
    answers: int = -1  # the roster to which its endpoint belongs
    trouble: str = ""  # why it has no endpoint
    left: bool = False  # it waits no longer

    def dump(self) -> str:
        """Returns the arrival as text."""
        before = None if self.before is None else self.before.dump()
        return json.dumps([self.record.dump(), before, self.answers, self.trouble, self.left])

    @classmethod
    def parse(cls, text: str) -> Arrival:
        """Reads what `dump` has returned, or raises a ValueError."""
        try:
            record, before, answers, trouble, left = json.loads(text)
        except (ValueError, TypeError, RecursionError):
            raise ValueError("expected the record of a worker, found something else") from None
        parsed = None if before is None else PeerRecord.parse(before)
        return cls(PeerRecord.parse(record), parsed, int(answers), str(trouble), bool(left))


class Attendance:
    """The records of the workers that have come to meet one rank 0.

    Args:
        entries: where the workers meet.
        own: this worker's record.
        token: that of rank 0; `NOBODY` if this worker has found none.

    Attributes:
        came: by rank, as they were read last.
        refused: by rank, what is wrong with an entry in place of a record.
        asked: the tokens of the workers that must answer a roster, and its number.
    """

    def __init__(self, entries: SignedStore, own: PeerRecord, token: str) -> None:
        self.came: dict[int, Arrival] = {}
        self.refused: dict[int, Exception] = {}
        self.asked: tuple[set[str], int] = set(), -1
        self._entries = entries
        self._own = own
        self._token = token

    def key(self, rank: int) -> str:
        """Returns the key of a worker's record."""
        return f"record/{self._token}/{rank}"

    def write(self, arrival: Arrival) -> None:
        """Writes this worker's record."""
        self._entries.set(self.key(self._own.rank), arrival.dump())

    def arrive(self) -> None:
        """Writes this worker's record, in place of that of another worker of its rank."""
        if not self._entries.claim(self.key(self._own.rank), Arrival(self._own).dump()):
            other = self.present()
            here = other is not None and not other.left
            self.write(Arrival(self._own, other.record if other and here else None))

    def leave(self) -> None:
        """Writes that this worker waits no longer, unless another one has taken its place."""
        key = self.key(self._own.rank)
        entry, other = self._entries.get_raw(key), self.present()
        if other is not None and other.record.token == self._own.token:
            self._entries.replace(key, entry, replace(other, left=True).dump())

    def present(self) -> Arrival | None:
        """Returns what is in the place of this worker's record; None if it is refused."""
        self.read([self._own.rank])
        self.refused.pop(self._own.rank, None)
        return self.came.pop(self._own.rank, None)

    @property
    def absent(self) -> list[int]:
        """The ranks of other workers that don't wait, or have yet to answer, as was read last."""
        tokens, number = self.asked
        ready = {
            rank
            for rank, each in self.came.items()
            if not each.left and (each.answers == number or each.record.token not in tokens)
        }
        others = set(range(self._own.world_size)) - {self._own.rank}
        return sorted(others - ready)

    def late(self, left: bool) -> list[PeerRecord]:
        """Returns the records of absent workers that have come: that left, or that don't answer."""
        came = [self.came[rank] for rank in self.absent if rank in self.came]
        return [arrival.record for arrival in came if arrival.left is left]

    def complete(self) -> bool:
        """Reads the records once there is one for each rank; returns whether all are ready."""
        absent = self.absent
        keys = [self.key(rank) for rank in absent]
        # The first one alone is asked for most of the time, as a request names each key.
        if keys and self._entries.check(keys[:1]) and self._entries.check(keys):
            self.read(absent)
        return not self.absent

    def look(self) -> None:
        """Reads the records of absent workers that have come."""
        self.read([rank for rank in self.absent if self._entries.check([self.key(rank)])])

    def read(self, ranks: Sequence[int]) -> None:
        """Reads the records of some ranks, which exist."""
        entries = self._entries.get_all_raw([self.key(rank) for rank in ranks]) if ranks else []
        for rank, entry in zip(ranks, entries, strict=True):
            try:
                arrival = Arrival.parse(self._entries.verified(self.key(rank), entry))
                if (found := arrival.record.rank) != rank:
                    raise ValueError(f"expected the record of rank {rank}, found that of {found}")
            except (AuthenticationError, ValueError) as error:
                self.refuse(rank, error)
            else:
                self.refused.pop(rank, None)
                self.came[rank] = arrival

    def refuse(self, rank: int, error: Exception) -> None:
        """Notes, and logs once, what is wrong with an entry."""
        if str(self.refused.get(rank)) != str(error):
            info = self._own.info
            logger.warning("%s refuses what claims to be worker %d: %s", info, rank, error)
        self.refused[rank] = error
        self.came.pop(rank, None)

    def mutual_refusal(self) -> RpcError:
        """Returns the error for a worker that this one has refused, and that knows it."""
        rank, error = next(iter(self.refused.items()))
        kind = AuthenticationError if isinstance(error, AuthenticationError) else RendezvousError
        return kind(
            f"worker {self._own.name} (rank {self._own.rank}) and the worker of rank {rank} refuse "
            f"each other: {error}"
        )

    def misfit(self, expected: str, note: str) -> RpcError | None:
        """Returns why this worker and those that have come can't be in one mesh, if they can't.

        Args:
            expected: the beginning of the text.
            note: what else may be the reason if a record was refused.
        """
        for arrival in self.came.values():
            if (mismatch := arrival.record.mismatch(self._own)) is not None:
                return RendezvousError(mismatch)
        if not self.refused:
            return None
        rank, error = next(iter(self.refused.items()))
        return AuthenticationError(
            f"{expected} but what claims to be rank {rank} was refused{note}: {error}"
        )

    def missing(self, expected: str) -> RpcError | None:
        """Returns which ranks have not come, and where the others are; None if all have."""
        absent = set(self.absent).difference(self.came)
        if not absent:
            return None
        why = describe_missing(absent)
        for arrival in self.came.values():
            if arrival.before is not None:
                places = describe_places([arrival.before, arrival.record])
                why = f"rank {arrival.record.rank} came twice, from {places}, and {why}"
        came = {rank: arrival.record for rank, arrival in self.came.items()}
        hosts = describe_hosts((came | {self._own.rank: self._own}).values())
        return RendezvousError(f"{expected} but {why}; {hosts}")


def claimed_token(entry: bytes) -> str:
    """Returns the token in a record whose signature was not checked; empty if there is none."""
    try:
        token = str(json.loads(entry.partition(b" ")[2])["token"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""
    return token if is_token(token) else ""

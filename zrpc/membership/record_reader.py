"""The peer records of workers that meet in a store: those of members are read, others refused."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from zrpc.errors import AuthenticationError, RendezvousError
from zrpc.membership.launched import stop_error
from zrpc.membership.missing_ranks import describe_missing, describe_places, rank_ranges
from zrpc.membership.peer_record import PeerRecord, is_token
from zrpc.membership.signed_store import SignedStore

__all__ = ["RecordReader", "announce", "wait_for"]

logger = logging.getLogger(__name__)

_SAME_RANK = "same rank"
# The store is polled with a pause that grows from the first number to the second. Its own wait()
# would be an event to await, but Ctrl-C does not end it, TCPStore logs each timeout of it as a
# network error, and FileStore's polls once a second.
_PAUSE_SECONDS = (0.001, 0.05)


class RecordReader:
    """Reads the records of all ranks, and protests against those that no member has written.

    Args:
        entries: where the workers meet.
        own: this worker's record.
        deadline: of the rendezvous, on the clock of ``time.monotonic``.
        protest_seconds: how long the author of a refused record has to read the protest, at most.

    Attributes:
        refused: what is in place of a record, by rank: the entry, and what is wrong with it.
    """

    def __init__(
        self, entries: SignedStore, own: PeerRecord, deadline: float, protest_seconds: float
    ) -> None:
        self.refused: dict[int, tuple[bytes, Exception]] = {}
        self._entries = entries
        self._own = own
        self._deadline = deadline
        self._protest_seconds = protest_seconds
        self._keys = [f"record/{rank}" for rank in range(own.world_size)]
        # The records of two workers that were given one rank. One of them must still be in its
        # place, or they are of an earlier run.
        self._twice: tuple[PeerRecord, PeerRecord] | None = None

    def write_own(self) -> None:
        """Writes this worker's record."""
        self._entries.set(self._keys[self._own.rank], self._own.dump())

    def exist(self, ranks: Iterable[int]) -> bool:
        """Whether there is an entry for each of these ranks."""
        return self._entries.check([self._keys[rank] for rank in ranks])

    def all(self) -> list[PeerRecord]:
        """Returns the records of all ranks, without the refused ones.

        Raises:
            AuthenticationError: this worker's record was replaced by one that is refused.
            RendezvousError: another worker has this worker's rank.
        """
        own = self._own
        entries = self._entries.get_all_raw(self._keys)
        found = [self._read(rank, entry) for rank, entry in enumerate(entries)]
        mine = found[own.rank]
        if mine is None:
            raise AuthenticationError(
                f"the record of worker {own.name} (rank {own.rank}) was replaced: "
                f"{self.refused[own.rank][1]}"
            )
        if mine != own:
            raise RendezvousError(
                f"rank {own.rank} is not unique: workers {describe_places([own, mine])} both have "
                "it"
            )
        return [record for record in found if record is not None]

    def present(self, ranks: Sequence[int]) -> list[PeerRecord]:
        """Returns the valid records of some ranks."""
        there = [rank for rank in ranks if self.exist([rank])]
        entries = self._entries.get_all_raw([self._keys[rank] for rank in there])
        found = [self._read(*pair) for pair in zip(there, entries, strict=True)]
        return [record for record in found if record is not None]

    def look_for_same_rank(self) -> None:
        """Looks for two workers with one rank, which is done while others are missing.

        The record of the second one replaces that of the first. Only the first can distinguish this
        from the record of an earlier run, which it would replace itself. So it writes down both.
        """
        for record in self.present([self._own.rank]):
            if record != self._own and self._twice != (self._own, record):
                self._twice = (self._own, record)
                self._entries.set(_SAME_RANK, json.dumps([each.dump() for each in self._twice]))
                return
        self._twice = self._written_twice()

    def _written_twice(self) -> tuple[PeerRecord, PeerRecord] | None:
        if not self._entries.check([_SAME_RANK]):
            return None
        try:
            first, second = map(PeerRecord.parse, json.loads(self._entries.get(_SAME_RANK)))
        except (AuthenticationError, ValueError, TypeError):
            return None
        if not 0 <= first.rank < self._own.world_size:
            return None
        is_now = any(each in (first, second) for each in self.present([first.rank]))
        return (first, second) if is_now else None

    def describe_missing(self, missing: Iterable[int]) -> str:
        """Returns which ranks are missing, what to do, and which rank came twice, if one did."""
        text = describe_missing(missing)
        if (twice := self._twice) is None:
            return text
        return f"rank {twice[0].rank} came twice, from {describe_places(twice)}, and {text}"

    def refusal(self, note: str) -> str:
        """Returns which records were refused, with a note, and why the first of them was."""
        rank, (_, error) = next(iter(self.refused.items()))
        ranks = f"rank{'s' if len(self.refused) > 1 else ''} {rank_ranges(self.refused)}"
        return f"but what claims to be {ranks} was refused{note}. Rank {rank}: {error}"

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
        self.refused.pop(rank, None)
        return record

    def _refuse(self, rank: int, entry: bytes, error: Exception) -> None:
        own, token = self._own, _claimed_token(entry)
        if rank not in self.refused or self.refused[rank][0] != entry:
            self.refused[rank] = entry, error
            logger.warning("%s refuses what claims to be worker %d: %s", own.info, rank, error)
            if token:
                self._entries.set(f"protest/{token}/{own.token}", "refused")
        if token and self._entries.check([f"protest/{own.token}/{token}"]):
            # For the other worker to read the protest too: this one may be the host.
            deadline = min(self._deadline, time.monotonic() + self._protest_seconds)
            heard = [f"heard/{token}/{own.token}"]
            announce(self._entries, f"heard/{own.token}/{token}", heard, deadline)
            raise AuthenticationError(
                f"worker {own.name} (rank {own.rank}) and the worker of rank {rank} refuse each "
                f"other: {error}"
            )


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


def announce(entries: SignedStore, key: str, awaited: Sequence[str], deadline: float) -> None:
    """Writes an entry; then waits until there are others, unless the store is gone."""
    with contextlib.suppress(RuntimeError, OSError):
        entries.set(key, "1")
        wait_for(lambda: not awaited or entries.check(awaited), deadline)


def _claimed_token(entry: bytes) -> str:
    """Returns the token in a record whose signature was refused; empty if there is none."""
    try:
        token = str(json.loads(entry.partition(b" ")[2])["token"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""
    return token if is_token(token) else ""

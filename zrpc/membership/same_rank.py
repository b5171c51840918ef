"""Two workers that were given the same rank: found by one of them, and made known to all."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence

from zrpc.errors import AuthenticationError
from zrpc.membership.missing_ranks import describe_missing, describe_places
from zrpc.membership.peer_record import PeerRecord
from zrpc.membership.signed_store import SignedStore

__all__ = ["SameRank"]

_KEY = "same rank"


class SameRank:
    """Looks for two workers with one rank while others are missing.

    The record of the second one replaces that of the first. Only the first can distinguish this
    from the record of an earlier run, which it would replace itself. So it writes down both.

    Args:
        entries: where the workers meet.
        own: this worker's record.
        read: returns the valid records of some ranks.

    Attributes:
        found: the records of both; None if there are none. One of them must still be in its place,
            or they are of an earlier run.
    """

    def __init__(
        self,
        entries: SignedStore,
        own: PeerRecord,
        read: Callable[[Sequence[int]], list[PeerRecord]],
    ) -> None:
        self.found: tuple[PeerRecord, PeerRecord] | None = None
        self._entries = entries
        self._own = own
        self._read = read

    def look(self) -> None:
        """Looks whether there are such workers."""
        for record in self._read([self._own.rank]):
            if record != self._own and self.found != (self._own, record):
                self.found = (self._own, record)
                self._entries.set(_KEY, json.dumps([each.dump() for each in self.found]))
                return
        self.found = self._written()

    def _written(self) -> tuple[PeerRecord, PeerRecord] | None:
        if not self._entries.check([_KEY]):
            return None
        try:
            text = self._entries.verified(_KEY, self._entries.get_raw(_KEY))
            first, second = map(PeerRecord.parse, json.loads(text))
        except (AuthenticationError, ValueError, TypeError):
            return None
        if not 0 <= first.rank < self._own.world_size:
            return None
        is_now = any(each in (first, second) for each in self._read([first.rank]))
        return (first, second) if is_now else None

    def describe(self, missing: Iterable[int]) -> str:
        """Returns which ranks are missing, what to do, and which rank came twice, if one did."""
        text = describe_missing(missing)
        if (twice := self.found) is None:
            return text
        return f"rank {twice[0].rank} came twice, from {describe_places(twice)}, and {text}"

"""The news of a mesh, in a store: a list to which all append, and that all read from its start.

Any ``torch.distributed.Store`` will do. The next place in the list is taken by an atomic
compare_set, so that all see the same order and there are no gaps. An item is signed together with
its place and with the mesh's own id, so that no old item can be put in the place of another.

Each reader *notes* how far it has come, for those who must know that all have read something.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable

from zrpc.entries import Entries
from zrpc.errors import AuthenticationError
from zrpc.roster import Item

__all__ = ["News", "take_ranks"]

logger = logging.getLogger(__name__)

# So many items are read at once where there are many.
_MOST_AT_ONCE = 64


def take_ranks(entries: Entries, count: int) -> int:
    """Takes so many ranks that nobody else is given; returns the first of them."""
    return entries.count("ranks", count) - count


class News:
    """One worker's access to the news. For one thread at a time.

    Args:
        entries: in the store that all share.

    Raises:
        AuthenticationError: there are news in that store that are signed otherwise.
    """

    def __init__(self, entries: Entries) -> None:
        self._entries = entries
        self._mesh = entries.first("mesh", secrets.token_hex(8))
        self._position = 0

    def post(self, item: Item) -> None:
        """Appends an item."""
        place, text = self._position, item.dump()
        while not self._entries.claim(self._key(place), text):
            place += 1

    def read(self) -> list[Item | None]:
        """What was appended since the last call; None for an item that is no member's."""
        items: list[Item | None] = []
        count = 1
        while True:
            keys = [self._key(self._position + i) for i in range(count)]
            if self._entries.check(keys):
                found = zip(keys, self._entries.all_raw(keys), strict=True)
                items += [self._opened(key, entry) for key, entry in found]
                self._position += count
                count = min(2 * count, _MOST_AT_ONCE)
            elif count == 1:
                return items
            else:
                count = 1

    def note(self, token: str, position: int) -> None:
        """Notes that the worker with this token has read so many items."""
        self._entries.set(f"read/{token}", str(position))

    def noted(self, tokens: Iterable[str]) -> list[int]:
        """How far workers have read, all of which must have noted something.

        Returns:
            0 for a note that is not the worker's.
        """
        keys = [f"read/{token}" for token in tokens]
        found = zip(keys, self._entries.all_raw(keys), strict=True) if keys else ()
        return [self._position_in(key, entry) for key, entry in found]

    def next_rank(self) -> int:
        """A rank that nobody else is given."""
        return take_ranks(self._entries, 1)

    def _key(self, place: int) -> str:
        return f"news/{self._mesh}/{place}"

    def _position_in(self, key: str, entry: bytes) -> int:
        try:
            return int(self._entries.opened(key, entry))
        except (AuthenticationError, ValueError) as error:
            logger.debug("a note is refused: %s", error)
            return 0

    def _opened(self, key: str, entry: bytes) -> Item | None:
        try:
            return Item.parse(self._entries.opened(key, entry))
        except (AuthenticationError, ValueError) as error:
            logger.warning("an item of the mesh's news is refused: %s", error)
            return None

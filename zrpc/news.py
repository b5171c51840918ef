"""The news of a mesh, in a store: a list to which all append, and that all read from its start.

Any ``torch.distributed.Store`` will do. The next place in the list is taken by an atomic
compare_set, so that all see the same order and there are no gaps. An item is signed together with
its place and with the mesh's own id, so that no old item can be put in the place of another.

Each reader *notes* how far it has come, for those who must know that all have read something.

Old items are forgotten, by the rules of ``zrpc.horizon``: then the news begin with a summary. So
the number of entries follows that of the members, however many there ever were.
"""

from __future__ import annotations

import logging
import secrets

from zrpc.entries import Entries
from zrpc.errors import AuthenticationError, RendezvousError
from zrpc.horizon import Horizon
from zrpc.item import Item
from zrpc.roster import Roster
from zrpc.summary import Summary
from zrpc.worker_info import RANKS

__all__ = ["News", "take_ranks"]

logger = logging.getLogger(__name__)

# A reader looks whether its place is still there with every so many reads that find nothing.
_LOOK_EVERY = 5
# The most bytes of a summary; of 4096 members, with the longest names, it has fewer. TCPStore
# takes 8 MiB.
_LONGEST_SUMMARY = 1 << 23


def take_ranks(entries: Entries, count: int) -> int:
    """Takes so many ranks, one after the other; returns the first of them.

    Nobody else is given them until all `RANKS` have been given.
    """
    first = (entries.count("ranks", count) - count) % RANKS
    return first if first + count <= RANKS else take_ranks(entries, count)


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
        self._begun = False
        self._position = 0
        self._in_vain = 0  # reads, since the horizon was looked at
        # As it was seen last, and its entry.
        self._horizon = Horizon()
        self._horizon_entry = b""
        self._shortens = entries.can_forget

    def post(self, item: Item) -> bool:
        """Appends an item.

        Returns:
            False where nobody may ever read it, since so much was written meanwhile that the end
            of the news could not be found: see, after another `read`, whether it needs saying.
        """
        self._look_back()
        place, text = max(self._position, self._horizon.base), item.dump()
        while not self._entries.claim(self._key(place), text):
            place += 1
        self._look_back()
        if place >= self._horizon.floor:
            return True
        self._entries.delete(self._key(place))
        return False

    def read(self) -> list[Item | Summary | None]:
        """What was appended since the last call; None for an item that is no member's.

        First of all, and where so much was appended that it was forgotten meanwhile, a summary of
        what came before.

        Raises:
            AuthenticationError: the horizon or the summary is signed otherwise.
            RendezvousError: there is no summary.
        """
        if not self._begun:
            self._look_back()
            self._begun = True
            if self._horizon.generation:
                return self._begin_anew()
        first, items = self._position, self._read_on()
        self._in_vain = 0 if items else self._in_vain + 1
        if items or self._in_vain >= _LOOK_EVERY:
            self._in_vain = 0
            self._look_back()
        return self._begin_anew() if self._horizon.floor > first else [*items]

    def shorten(self, roster: Roster, line: int) -> None:
        """Writes a summary where the news have become long, and deletes old ones.

        Args:
            roster: has read what `read` has returned.
            line: how many members should rather do so; see `Horizon.due`.
        """
        now = self._horizon
        roster.forget(now.base)
        if not self._shortens or not now.due(roster.position, len(roster.members), line):
            return
        self._look_back()
        if self._horizon != now:
            return  # somebody else does it
        self._delete_dead(now, roster)
        key = self._summary_key(now.generation + 1)
        try:
            text = self._entries.first(key, roster.summary().dump(), _LONGEST_SUMMARY)
            moved = now.moved(Summary.parse(text).position)
        except (AuthenticationError, ValueError) as error:
            logger.warning("the mesh's news are not shortened: %s", error)
            self._shortens = False
            return
        self._entries.replace(self._horizon_key, self._horizon_entry, moved.dump())
        self._look_back()
        if self._horizon.generation > moved.generation:
            self._entries.delete(key)  # too late; others may have deleted it before it was written

    def note(self, token: str, position: int) -> None:
        """Notes that the worker with this token has read so many items."""
        self._entries.set(_note_key(token), str(position))

    def noted(self, token: str) -> int:
        """How far a worker has read.

        Returns:
            0 where there is no note, or one that is not the worker's.
        """
        entry = self._entries.peek(key := _note_key(token))
        if entry is None:
            return 0
        try:
            return int(self._entries.opened(key, entry))
        except (AuthenticationError, ValueError) as error:
            logger.debug("a note is refused: %s", error)
            return 0

    def withdraw(self, token: str) -> None:
        """Removes a worker's note; to be called where it is no member any more."""
        if self._shortens:
            self._entries.delete(_note_key(token))

    def next_rank(self) -> int:
        """A rank that nobody else is given, until all have been given."""
        return take_ranks(self._entries, 1)

    def _key(self, place: int) -> str:
        return f"news/{self._mesh}/{place}"

    def _summary_key(self, generation: int) -> str:
        return f"summary/{self._mesh}/{generation}"

    @property
    def _horizon_key(self) -> str:
        return f"horizon/{self._mesh}"

    def _look_back(self) -> None:
        """Sees how far back the news go by now."""
        entry = self._entries.peek(self._horizon_key)
        if entry is None or entry == self._horizon_entry:
            return
        try:
            horizon = Horizon.parse(self._entries.opened(self._horizon_key, entry))
        except ValueError as error:
            raise RendezvousError(f"the news of the mesh can't be read: {error}") from error
        if horizon.generation > self._horizon.generation:  # else somebody repeats an old one
            self._horizon, self._horizon_entry = horizon, entry

    def _read_on(self) -> list[Item | None]:
        """Reads up to the end, or to what is deleted; it counts only from the floor on."""
        items = []
        while (entry := self._entries.peek(key := self._key(self._position))) is not None:
            items.append(self._opened(key, entry))
            self._position += 1
        return items

    def _begin_anew(self) -> list[Item | Summary | None]:
        """The newest summary, and what came after it."""
        while True:
            summary = self._read_summary()
            self._position = summary.position
            items = self._read_on()
            self._look_back()
            if self._horizon.floor <= summary.position:
                return [summary, *items]

    def _read_summary(self) -> Summary:
        while (entry := self._entries.peek(self._summary_key(self._horizon.generation))) is None:
            generation = self._horizon.generation
            self._look_back()
            if self._horizon.generation == generation:
                raise RendezvousError(
                    "expected a summary of the mesh's news in the store, found none: something "
                    "else has deleted it; start the mesh again with a new store"
                )
        key = self._summary_key(self._horizon.generation)
        try:
            return Summary.parse(self._entries.opened(key, entry, _LONGEST_SUMMARY))
        except ValueError as error:
            raise RendezvousError(f"the news of the mesh can't be read: {error}") from error

    def _delete_dead(self, horizon: Horizon, roster: Roster) -> None:
        """Deletes what nobody reads any more; some of it may be deleted already."""
        for place in horizon.dead:
            self._entries.delete(self._key(place))
        for token in roster.lost.values():
            self._entries.delete(_note_key(token))
        if horizon.generation > 1:
            self._entries.delete(self._summary_key(horizon.generation - 1))

    def _opened(self, key: str, entry: bytes) -> Item | None:
        try:
            return Item.parse(self._entries.opened(key, entry))
        except (AuthenticationError, ValueError) as error:
            logger.warning("an item of the mesh's news is refused: %s", error)
            return None


def _note_key(token: str) -> str:
    return f"read/{token}"

"""The log of a mesh, in a store: a list to which all append, and that all read from its start.

Any of torch's stores will do. The next place in the list is taken by an atomic
compare_set, so that all see the same order and there are no gaps. An event is signed together with
its place and with the mesh's own id, so that no old event can be put in the place of another.

Each reader *notes* its position, for workers that must know that all have read an event.

Old events are deleted, by the rules of ``zrpc.services.elastic.compaction``: then the log begins
with a snapshot. So the number of entries depends on how many members there are, not on how many
there ever were.
"""

from __future__ import annotations

import logging
import secrets

from zrpc.errors import AuthenticationError, RendezvousError
from zrpc.membership.signed_store import SignedStore, take_ranks
from zrpc.services.elastic.compaction import LogBounds
from zrpc.services.elastic.state import MembershipEvent, MembershipState

logger = logging.getLogger(__name__)

# After this many reads that find nothing, a reader checks whether its place is still there.
_EMPTY_READS_PER_CHECK = 5
# The snapshot of 4096 members with the longest names is smaller. TCPStore takes 8 MiB.
_MAX_SNAPSHOT_BYTES = 1 << 23


class MembershipLog:
    """One worker's access to the log, in the store that all share. For one thread at a time.

    Raises:
        AuthenticationError: the log in that store is signed with another secret.
    """

    def __init__(self, entries: SignedStore) -> None:
        self._entries = entries
        self._mesh = entries.get_or_set("mesh", secrets.token_hex(8))
        self._bounds_key = f"bounds/{self._mesh}"
        self._position = 0
        self._empty_reads = 0  # since the bounds were read
        # As they were read last, and their entry.
        self._bounds = LogBounds()
        self._bounds_entry = b""
        self._compacts = True  # until a snapshot can't be read

    def append(self, event: MembershipEvent) -> bool:
        """Appends an event; returns False if it may never be read.

        Then so much was appended meanwhile that the end of the log could not be found. The caller
        must `read`, and then check whether the event is still needed.
        """
        self._read_bounds()
        place, text = max(self._position, self._bounds.base), event.dump()
        while not self._entries.claim(self._key(place), text):
            place += 1
        self._read_bounds()
        if place >= self._bounds.floor:
            return True
        self._entries.delete(self._key(place))
        return False

    def read(self) -> list[MembershipEvent | MembershipState | None]:
        """Returns what was appended since the last call; None for an event that is refused.

        It begins with a snapshot of all earlier events in the first call, and also if so much was
        appended since the last one that events were deleted.

        Raises:
            AuthenticationError: the bounds or the snapshot are signed with another secret.
            RendezvousError: there is no snapshot.
        """
        if not self._position:
            self._read_bounds()
            if self._bounds.generation:
                return self._read_from_snapshot()
        first, events = self._position, self._read_events()
        self._empty_reads = 0 if events else self._empty_reads + 1
        if events or self._empty_reads >= _EMPTY_READS_PER_CHECK:
            self._empty_reads = 0
            self._read_bounds()
        return self._read_from_snapshot() if self._bounds.floor > first else [*events]

    def catch_up(self, state: MembershipState) -> None:
        """Applies what was appended since the last read."""
        for entry in self.read():
            state.apply(entry)

    def compact(self, state: MembershipState, predecessors: int) -> None:
        """Writes a snapshot if the log has become long, and deletes old events.

        The state has applied all that `read` has returned. For predecessors see `LogBounds.due`.
        """
        now = self._bounds
        state.forget_lost(now.base)
        due = now.due(state.position, len(state.members), predecessors, state.limits)
        if not self._compacts or not due:
            return
        self._read_bounds()
        if self._bounds != now:
            return  # another member does it
        self._delete_dead(now, state)
        key = self._snapshot_key(now.generation + 1)
        try:
            text = self._entries.get_or_set(key, state.dump(), _MAX_SNAPSHOT_BYTES)
            moved = now.moved(MembershipState.parse(text).position)
        except (AuthenticationError, ValueError) as error:
            logger.warning("the mesh's log is not compacted: %s", error)
            self._compacts = False
            return
        self._entries.replace(self._bounds_key, self._bounds_entry, moved.dump())
        self._read_bounds()
        if self._bounds.generation > moved.generation:
            self._entries.delete(key)  # too late; others may have deleted it before it was written

    def note_position(self, token: str, position: int) -> None:
        """Notes how many events the worker with this token has read."""
        self._entries.set(_position_key(token), str(position))

    def noted_position(self, token: str) -> int:
        """Returns how many events a worker has read; 0 if it has noted nothing itself."""
        entry = self._entries.peek(key := _position_key(token))
        try:
            return 0 if entry is None else int(self._entries.verified(key, entry))
        except (AuthenticationError, ValueError) as error:
            logger.debug("a note is refused: %s", error)
            return 0

    def withdraw_position(self, token: str) -> None:
        """Removes a worker's note; must be called when it is no longer a member."""
        self._entries.delete(_position_key(token))

    def next_rank(self) -> int:
        """Returns a rank that no other worker is given, until all have been given."""
        return take_ranks(self._entries, 1)

    def _key(self, place: int) -> str:
        return f"log/{self._mesh}/{place}"

    def _snapshot_key(self, generation: int) -> str:
        return f"snapshot/{self._mesh}/{generation}"

    def _read_bounds(self) -> None:
        """Reads how far back the log reaches by now."""
        entry = self._entries.peek(self._bounds_key)
        if entry is None or entry == self._bounds_entry:
            return
        try:
            bounds = LogBounds.parse(self._entries.verified(self._bounds_key, entry))
        except ValueError as error:
            raise RendezvousError(f"the log of the mesh can't be read: {error}") from error
        if bounds.generation > self._bounds.generation:  # else somebody has put an old one there
            self._bounds, self._bounds_entry = bounds, entry

    def _read_events(self) -> list[MembershipEvent | None]:
        """Reads up to the end, or to what is deleted; events count only from the floor on."""
        events = []
        while (entry := self._entries.peek(key := self._key(self._position))) is not None:
            events.append(self._verified(key, entry))
            self._position += 1
        return events

    def _read_from_snapshot(self) -> list[MembershipEvent | MembershipState | None]:
        """Returns the newest snapshot, and the events after it."""
        while True:
            snapshot = self._read_snapshot()
            self._position = snapshot.position
            events = self._read_events()
            self._read_bounds()
            if self._bounds.floor <= snapshot.position:
                return [snapshot, *events]

    def _read_snapshot(self) -> MembershipState:
        while (entry := self._entries.peek(self._snapshot_key(self._bounds.generation))) is None:
            generation = self._bounds.generation
            self._read_bounds()
            if self._bounds.generation == generation:
                raise RendezvousError(
                    "expected a snapshot of the mesh's state in the store, found none: something "
                    "else has deleted it; start the mesh again with a new store"
                )
        key = self._snapshot_key(self._bounds.generation)
        try:
            return MembershipState.parse(self._entries.verified(key, entry, _MAX_SNAPSHOT_BYTES))
        except ValueError as error:
            raise RendezvousError(f"the log of the mesh can't be read: {error}") from error

    def _delete_dead(self, bounds: LogBounds, state: MembershipState) -> None:
        """Deletes what is no longer read; some of it may be deleted already."""
        for place in bounds.dead:
            self._entries.delete(self._key(place))
        for token in state.lost.values():
            self._entries.delete(_position_key(token))
        if bounds.generation > 1:
            self._entries.delete(self._snapshot_key(bounds.generation - 1))

    def _verified(self, key: str, entry: bytes) -> MembershipEvent | None:
        try:
            return MembershipEvent.parse(self._entries.verified(key, entry))
        except (AuthenticationError, ValueError) as error:
            logger.warning("an event of the mesh's log is refused: %s", error)
            return None


def _position_key(token: str) -> str:
    return f"position/{token}"

"""How far back the log of a mesh reaches: the rules for the deletion of old events. No I/O here.

A worker that reads the log knows which workers are in the mesh, and old events serve no other
purpose. So now and then a member writes that down, in a *snapshot*
(``zrpc.services.elastic.state``), and the events before it are deleted. A worker that joins then
reads the newest snapshot, and the events after it::

                swept         floor          base            the end
    places   ....|.............|..............|.................|
                  dead: being   for slow       read by workers
                  deleted       readers        that join

- The bounds are one entry of the store. A member moves them only if it finds the value that it
  expects (compare_set), and only forward, by one *generation* with each snapshot. So if two do that
  at once, the later one has no effect.
- Only events below the floor are deleted, and the floor is where the last snapshot but one ends. So
  a reader loses its place only if two snapshots were written since its last read, for example while
  it was frozen. It then goes on from the newest snapshot.
- An entry below the floor must not be believed: a writer that was frozen may write there again
  after another member has deleted. So a member that has read or written an entry reads the bounds
  *afterwards*. The entry counts only if it is not below the floor.
- A snapshot is written before the bounds refer to it. Its name is its generation, and the first
  that is written under it counts. If its author dies before it moves the bounds, another member
  does.
- Dead events are deleted before the bounds move on. If a member dies in the middle of that, another
  deletes all of them again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from zrpc.services.elastic.limits import ElasticLimits


@dataclass(frozen=True, slots=True)
class LogBounds:
    """How far back the log reaches."""

    generation: int = 0  # how many snapshots have been written: the number of the last one
    swept: int = 0  # all events below this place are deleted
    floor: int = 0  # events below this place must not be relied upon
    base: int = 0  # the newest snapshot stands for the events below this place

    @property
    def dead(self) -> range:
        """The places to delete before the bounds move on."""
        return range(self.swept, self.floor)

    def due(self, position: int, members: int, predecessors: int, limits: ElasticLimits) -> bool:
        """Whether a member that has read events up to a position must write a snapshot.

        A number of other members, its predecessors, must do so sooner. If they are frozen, this one
        does it some events later.
        """
        events = limits.snapshot_events + limits.snapshot_events_per_member * members
        return position - self.base >= events + predecessors

    def moved(self, base: int) -> LogBounds:
        """Returns the next bounds, after the dead events are deleted and a snapshot is written."""
        return LogBounds(self.generation + 1, self.floor, self.base, base)

    def dump(self) -> str:
        """Returns the bounds as text."""
        return json.dumps([self.generation, self.swept, self.floor, self.base])

    @classmethod
    def parse(cls, text: str) -> LogBounds:
        """Reads bounds that were written by `dump`.

        Raises:
            ValueError: they aren't bounds of this version of zrpc.
        """
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            values = None
        if (
            not isinstance(values, list)
            or [type(value) for value in values] != [int] * 4
            or values[0] < 1
            or values[1:] != sorted(values[1:])
            or values[1] < 0
        ):
            raise ValueError(f"expected the bounds of a mesh's log, found {text:.99}")
        return cls(*values)

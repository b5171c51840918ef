"""How far back the news of a mesh go: the rules by which old ones are forgotten. No I/O in here.

Whoever reads the news knows who is in the mesh, and that is all that old ones are good for. So
now and then somebody writes it down, in a *summary* (``zrpc.summary``), and what came before is
forgotten. Who joins then reads the newest summary, and what came after it::

                swept         floor          base            the end
    places   ....|.............|..............|.................|
                  dead: being   for those who  what who joins
                  deleted       read slowly    reads

- The horizon is one entry of the store. Whoever moves it has found there what he expected
  (compare_set), and only ever moves it forward, by one *generation* with each summary. So one of
  two who do that at once is too late, and does nothing.
- Only what is below the floor is deleted, and the floor is where the last summary but one ends. So
  a reader loses its place only if two were written since it looked last: where it was frozen, say.
  It then goes on from the newest summary.
- What is below the floor is not to be believed: a writer that was frozen may write there again,
  where another has deleted. So who has read something, or written it, looks at the horizon
  *afterwards*: what it has read counts only from the floor on, and so does what it has written.
- A summary is there before the horizon says so. Its name is its generation, and the first that
  is written under it counts. Where its author dies before it moves the horizon, another one does.
- What is dead is deleted before the horizon moves on. Where somebody dies in the midst of that,
  another deletes all of it again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

__all__ = ["Horizon"]

# So many items since the last summary are worth another one: at least, and for each member.
_LENGTH = 32
_LENGTH_PER_MEMBER = 2


@dataclass(frozen=True, slots=True)
class Horizon:
    """How far back the news go.

    Attributes:
        generation: how many summaries have been written; the last one has this number.
        swept: below this place, all is deleted.
        floor: what is below this place must not be relied upon.
        base: what is below this place, the newest summary says.
    """

    generation: int = 0
    swept: int = 0
    floor: int = 0
    base: int = 0

    @property
    def dead(self) -> range:
        """The places to delete before the horizon moves on."""
        return range(self.swept, self.floor)

    def due(self, position: int, members: int, line: int) -> bool:
        """Whether a member is to write a summary.

        Args:
            position: how many items it has read.
            members: how many there are.
            line: how many of them come before it in the line of those that may do so. Should
                they be frozen, it does so some items later.
        """
        return position - self.base >= _LENGTH + _LENGTH_PER_MEMBER * members + line

    def moved(self, base: int) -> Horizon:
        """The next one, with the summary of what is below ``base``; what was dead is deleted."""
        return Horizon(self.generation + 1, self.floor, self.base, base)

    def dump(self) -> str:
        """The horizon as text."""
        return json.dumps([self.generation, self.swept, self.floor, self.base])

    @classmethod
    def parse(cls, text: str) -> Horizon:
        """Reads a horizon that was written by `dump`.

        Raises:
            ValueError: it is none, or one of another version of zrpc.
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
            raise ValueError(f"expected the horizon of a mesh's news, found {text:.99}")
        return cls(*values)

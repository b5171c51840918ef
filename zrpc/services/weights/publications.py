"""Who publishes under which name, as one worker knows it. No I/O in here.

There is no registry. Before a worker publishes, it *claims* the name at each member of the mesh, in
the order of their ids, and then *announces* the publication to all of them. Of two workers that
claim a name at once, the one that comes second to the first member they both ask is refused there,
and has claimed nothing beyond. A member that joins later is told by those that it joins.

Each member also knows a bound of the numbers of earlier versions, and answers a claim with it. The
new publisher numbers its versions from the highest of these bounds. What a publisher that has died
had pushed last is not known. So its successor leaves out a *block* of numbers, which no publisher
uses up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from zrpc.wire.member_id import MemberId

# Also at a thousand versions a second, they last for thirty years.
BLOCK = 10**12


class PublicationId(NamedTuple):
    """Which publication: the worker's, and its number there, from 1."""

    owner: MemberId
    number: int


@dataclass(frozen=True)
class Publication:
    """One publisher under a name.

    Attributes:
        id: which one.
        before: no earlier publication under this name had a higher version.
        announced: whether it is more than a claim.
        last: once it has ended, its last version; None before that.
    """

    id: PublicationId
    before: int
    announced: bool = False
    last: int | None = None

    @property
    def bound(self) -> int:
        """A version that neither this publication nor an earlier one exceeds."""
        if self.last is not None:
            return self.last
        return self.before + BLOCK if self.announced else self.before


def checked_name(name: object) -> str:
    """Returns the name of a publication.

    Raises:
        ValueError: it is empty, or no string.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(
            f"expected the name of a publication, a str that isn't empty, got {name!r:.99}"
        )
    return name


class Publications:
    """The latest publication under each name. For one thread at a time.

    Args:
        is_lost: returns whether a member is gone.
    """

    def __init__(self, is_lost: Callable[[MemberId], bool]) -> None:
        self._is_lost = is_lost
        self._latest: dict[str, Publication] = {}

    def latest(self, name: str) -> Publication | None:
        """Returns the latest publication under a name, which may have ended or be but a claim."""
        return self._latest.get(name)

    def is_live(self, publication: Publication) -> bool:
        """Returns whether its publisher may push."""
        return publication.last is None and not self._is_lost(publication.id.owner)

    def all(self) -> list[tuple[str, PublicationId, int, int | None]]:
        """Returns what a worker that joins has to know: arguments of `learn`."""
        known: list[tuple[str, PublicationId, int, int | None]] = []
        for name, each in self._latest.items():
            if self.is_live(each) and each.announced:
                known.append((name, each.id, each.before, None))
            elif each.bound:  # a claim may be withdrawn: only what was before it is told
                known.append((name, PublicationId(each.id.owner, 0), each.bound - 1, each.bound))
        return known

    def learn(self, name: str, id: PublicationId, before: int, last: int | None) -> None:
        """Notes what another member knows of a publication, which has ended if ``last`` is set."""
        self.announce(name, id, before)
        if last is not None:
            self.end(name, id, last)

    def claim(self, name: str, id: PublicationId) -> tuple[MemberId | None, int]:
        """Claims a name for a publication.

        Returns:
            The worker that has the name already, if there is one, and the highest number that
            versions had until now, as far as is known here.
        """
        found = self._latest.get(name)
        if found is None:
            self._latest[name] = Publication(id, 0)
            return None, 0
        if found.id != id and self.is_live(found):
            return found.id.owner, found.bound
        if found.id != id:
            self._latest[name] = Publication(id, found.bound)
        return None, self._latest[name].before

    def announce(self, name: str, id: PublicationId, before: int) -> None:
        """Notes that a publication has begun, unless a later one is known."""
        found = self._latest.get(name)
        if found is not None and found.announced and (found.id == id or found.before > before):
            return
        self._latest[name] = Publication(id, before, announced=True)

    def end(self, name: str, id: PublicationId, last: int | None) -> None:
        """Notes that a publication, or the claim for one, was withdrawn.

        Args:
            name: its name.
            id: which one.
            last: its last version, or the last one before it; None if that is not known.
        """
        # The word of its beginning may still be on its way.
        found = self._latest.setdefault(name, Publication(id, (last or 0) - 1, announced=True))
        if found.id == id:
            last = found.bound if last is None else last
            # Each publication takes a number at least: `before` says which of two is the later one.
            last = max(last, found.before + found.announced, found.last or 0)
            self._latest[name] = replace(found, last=last)

"""Who is in a mesh that workers join and leave while it runs: the rules. No I/O in here.

Workers tell each other *news*, which all read in the same order (``zrpc.news``). So all come to
the same view of who is in the mesh, whatever happens at the same time.

======= ================== =================================================================
news    from               meaning
======= ================== =================================================================
JOIN    a worker           I ask for this name and this rank (its card)
IN      the same           all members know me by now: I can be found from here on
GONE    anybody            that worker has left, or its process has ended
======= ================== =================================================================

- A name or a rank that a member has is refused to all others, until that member is gone. But a
  worker that was started again under its own name and rank takes the place of its predecessor,
  which has died, whether or not anybody has noticed.
- How many have had a rank before is a member's incarnation. All count alike, as all read the same.
- A worker that is refused may ask again. Once accepted, it is never accepted again: what is an old
  card of an old incarnation is none of a new one's.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from zrpc.card import Card
from zrpc.worker_info import INCARNATIONS, RANKS, WorkerInfo, number_of

__all__ = ["Change", "Departure", "Item", "Roster", "Verb", "What"]


class Verb(Enum):
    """What an item of the news says."""

    JOIN = "join"
    IN = "in"
    GONE = "gone"


class Departure(Enum):
    """Why a worker is gone."""

    LEFT = "left"
    ENDED = "ended"  # its process
    REPLACED = "replaced"  # by its next incarnation
    REFUSED = "refused"  # a member can't trust it


@dataclass(frozen=True, slots=True)
class Item:
    """One item of the news.

    Attributes:
        verb: what it says.
        token: of the worker that it is about.
        card: that worker's, for JOIN.
        why: for GONE.
        text: for GONE, more for who reads a log.
    """

    verb: Verb
    token: str
    card: Card | None = None
    why: Departure | None = None
    text: str = ""

    def dump(self) -> str:
        """The item as text."""
        card = None if self.card is None else self.card.dump()
        why = None if self.why is None else self.why.value
        return json.dumps([self.verb.value, self.token, card, why, self.text])

    @classmethod
    def parse(cls, text: str) -> Item:
        """Reads an item that was written by `dump`.

        Raises:
            ValueError: it is none, or one of another version of zrpc.
        """
        try:
            verb, token, card, why, more = json.loads(text)
            item = cls(
                Verb(verb),
                str(token),
                None if card is None else Card.parse(card),
                None if why is None else Departure(why),
                str(more),
            )
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"expected an item of a mesh's news, found another: {error}") from None
        wanted = (item.verb is Verb.JOIN, item.verb is Verb.GONE)
        if wanted != (item.card is not None, item.why is not None):
            raise ValueError(f"expected an item of a mesh's news, found half of one: {text:.99}")
        if item.card is not None and item.card.token != item.token:
            raise ValueError("expected a card of the worker that an item is about, found another's")
        return item


class What(Enum):
    """What the news have changed."""

    INTRODUCED = "introduced"
    ADMITTED = "admitted"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the view that all have.

    Attributes:
        what: the kind of change.
        card: whose; with its incarnation.
        why: for LOST.
        text: likewise, more for who reads a log.
    """

    what: What
    card: Card
    why: Departure | None = None
    text: str = ""


class Roster:
    """What the news say up to some position. For one thread at a time.

    Attributes:
        position: how many items were read.
        members: the cards of all that are accepted and not gone, by number.
        admitted: the numbers of those of them that can be found.
        departed: the cards of those that are gone, and why, by number.
    """

    def __init__(self) -> None:
        self.position = 0
        self.members: dict[int, Card] = {}
        self.admitted: set[int] = set()
        self.departed: dict[int, tuple[Card, Departure]] = {}
        self._starts: Counter[int] = Counter()
        self._joined: dict[str, tuple[int, int]] = {}  # by token: the number, and the position
        self._refused: dict[str, str] = {}

    def read(self, item: Item | None) -> list[Change]:
        """Reads the next item; None for one that could not be read.

        Returns:
            What has changed by it, in order.
        """
        self.position += 1
        if item is None:
            return []
        if item.card is not None:
            return list(self._join(item.card))
        number, _ = self._joined.get(item.token, (-1, 0))
        if number not in self.members:
            return []  # nobody's, or repeated
        if item.verb is Verb.GONE:
            assert item.why is not None
            return [self._lose(number, item.why, item.text)]
        if number in self.admitted:
            return []
        self.admitted.add(number)
        return [Change(What.ADMITTED, self.members[number])]

    def number(self, token: str) -> int | None:
        """The number of the worker with this token; None where it was not accepted."""
        found = self._joined.get(token)
        return None if found is None else found[0]

    def joined(self, token: str) -> int:
        """Which item brought the worker that was accepted with this token."""
        return self._joined[token][1]

    def refusal(self, token: str) -> str | None:
        """Why the worker with this token was refused the last time; None where it was not."""
        return self._refused.get(token)

    def obstacle(self, card: Card) -> Card | None:
        """The member that has the name or the rank that a card asks for."""
        for member in self.members.values():
            if member.rank == card.rank or member.name == card.name:
                again = (member.name, member.rank) == (card.name, card.rank)
                if not (again and card.restarts > member.restarts):
                    return member
        return None

    def mismatch(self, card: Card) -> str | None:
        """Why a worker does not belong into this mesh, whatever its name and rank."""
        other = next(iter(self.members.values()), None)
        if other is None or other.world_size == card.world_size:
            return None
        return _other_size(card, other)

    @property
    def missing(self) -> list[int]:
        """In a mesh of a fixed size, the ranks of those that are not in."""
        size = max((card.world_size for card in self.members.values()), default=0)
        return sorted(set(range(size)) - {self.members[number].rank for number in self.admitted})

    def deserters(self, card: Card) -> list[WorkerInfo]:
        """In a mesh of a fixed size: who has left it, while a worker was on its way back to it.

        None where that worker's predecessor has left as well: then all may meet anew.
        """
        _, why = self.departed.get(number_of(card.rank, card.incarnation - 1), (card, None))
        if why in (None, Departure.LEFT):
            return []
        last = [number_of(rank, self._starts[rank] - 1) for rank in self.missing]
        found = [self.departed[number] for number in last if number in self.departed]
        return [card.info for card, why in found if why is Departure.LEFT]

    def _join(self, card: Card) -> Iterator[Change]:
        if card.token in self._joined:
            return  # accepted before: somebody repeats an old card
        refusal = self._objection(card)
        if refusal is not None:
            self._refused[card.token] = refusal
            return
        self._refused.pop(card.token, None)
        for number, member in list(self.members.items()):
            if member.rank == card.rank:
                yield self._lose(number, Departure.REPLACED)
        card = replace(card, incarnation=self._starts[card.rank])
        self._starts[card.rank] += 1
        self.members[card.number] = card
        self._joined[card.token] = (card.number, self.position)
        yield Change(What.INTRODUCED, card)

    def _objection(self, card: Card) -> str | None:
        """Why a worker can't be accepted now; None where it can."""
        if (mismatch := self.mismatch(card)) is not None:
            return mismatch
        if not 0 <= card.rank < (card.world_size or RANKS):
            return f"expected a rank below {card.world_size or RANKS}, found {card.rank}"
        if self._starts[card.rank] >= INCARNATIONS:
            return f"rank {card.rank} was used {INCARNATIONS} times: take another one"
        other = self.obstacle(card)
        if other is None:
            return None
        if other.rank == card.rank:
            return (
                f"rank {card.rank} is not unique: workers {other.name} and {card.name} both ask "
                "for it"
            )
        return (
            f"worker name {card.name} is not unique: ranks {other.rank} and {card.rank} both ask "
            "for it"
        )

    def _lose(self, number: int, why: Departure, text: str = "") -> Change:
        card = self.members.pop(number)
        self.admitted.discard(number)
        self.departed[number] = (card, why)
        return Change(What.LOST, card, why, text)


def _other_size(card: Card, other: Card) -> str:
    if card.world_size and other.world_size:
        return (
            f"worker {card.name} (rank {card.rank}) expects a world of {card.world_size} workers, "
            f"but worker {other.name} (rank {other.rank}) one of {other.world_size}"
        )
    without = card if not card.world_size else other
    fixed = other if without is card else card
    return (
        f"RPC group mixes statically and dynamically: worker {fixed.name} (rank {fixed.rank}) has "
        f"a world size, {fixed.world_size}, and worker {without.name} (rank {without.rank}) none"
    )

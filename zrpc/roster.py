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
- A worker that is refused may ask again. Once accepted, it is not accepted again: what is an old
  card of an old incarnation is none of a new one's.

Of those that are gone only the last are remembered, and of all others how many there were of each
rank. So what is known does not grow as workers come and go, and fits into a summary
(``zrpc.summary``): who reads that has read all that came before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from zrpc.card import Card
from zrpc.item import Departure, Item, Verb
from zrpc.summary import Summary
from zrpc.worker_info import INCARNATIONS, RANKS, WorkerInfo, number_of

__all__ = ["Change", "Roster", "What"]

# So many of those that are gone, and of those that were refused, are remembered.
_REMEMBERED = 16


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
        departed: the cards of the last that are gone, and why, by number; in a mesh of a fixed
            size, of all.
        starts: how many members each rank has had.
        lost: the tokens of those that are gone, by the item that said so; `forget` shortens it.
    """

    def __init__(self) -> None:
        self.position = 0
        self.members: dict[int, Card] = {}
        self.admitted: set[int] = set()
        self.departed: dict[int, tuple[Card, Departure]] = {}
        self.starts: Counter[int] = Counter()
        self.lost: dict[int, str] = {}
        self._joined: dict[str, tuple[int, int]] = {}  # by token: the number, and the position
        self._refused: dict[str, str] = {}

    def read(self, item: Item | Summary | None) -> list[Change]:
        """Reads the next item, or what stands for all up to some place.

        Args:
            item: None for one that could not be read.

        Returns:
            What has changed by it, in order.
        """
        if isinstance(item, Summary):
            return list(self._skip_to(item))
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

    def summary(self) -> Summary:
        """What was read, in short."""
        return Summary(
            position=self.position,
            members=dict(self.members),
            joined={number: self._joined[card.token][1] for number, card in self.members.items()},
            admitted=frozenset(self.admitted),
            departed=dict(self.departed),
            starts=dict(self.starts),
        )

    def forget(self, position: int) -> None:
        """Forgets what `lost` says of the first so many items."""
        self.lost = {place: token for place, token in self.lost.items() if place > position}

    def number(self, token: str) -> int | None:
        """The number of the member with this token; None where there is none."""
        found = self._joined.get(token)
        return None if found is None else found[0]

    def joined(self, token: str) -> int:
        """Which item brought the member with this token."""
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
        last = [number_of(rank, self.starts[rank] - 1) for rank in self.missing]
        found = [self.departed[number] for number in last if number in self.departed]
        return [card.info for card, why in found if why is Departure.LEFT]

    def _join(self, card: Card) -> Iterator[Change]:
        if card.token in self._joined or any(
            card.token == gone.token for gone, _ in self.departed.values()
        ):
            return  # accepted before: somebody repeats an old card
        refusal = self._objection(card)
        if refusal is not None:
            self._refused[card.token] = refusal
            _shorten(self._refused)
            return
        self._refused.pop(card.token, None)
        for number, member in list(self.members.items()):
            if member.rank == card.rank:
                yield self._lose(number, Departure.REPLACED)
        card = replace(card, incarnation=self.starts[card.rank])
        self.starts[card.rank] += 1
        self.members[card.number] = card
        self._joined[card.token] = (card.number, self.position)
        yield Change(What.INTRODUCED, card)

    def _objection(self, card: Card) -> str | None:
        """Why a worker can't be accepted now; None where it can."""
        if (mismatch := self.mismatch(card)) is not None:
            return mismatch
        if not 0 <= card.rank < (card.world_size or RANKS):
            return f"expected a rank below {card.world_size or RANKS}, found {card.rank}"
        if self.starts[card.rank] >= INCARNATIONS:
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
        del self._joined[card.token]
        self.lost[self.position] = card.token
        self.departed[number] = (card, why)
        if not card.world_size:  # else there is a limit: how often workers are started again
            _shorten(self.departed)
        return Change(What.LOST, card, why, text)

    def _skip_to(self, summary: Summary) -> Iterator[Change]:
        """Takes over what a summary says; what came before it need not be read any more."""
        members, admitted = self.members, self.admitted
        self.position = summary.position
        self.members = dict(summary.members)
        self.admitted = set(summary.admitted)
        self.departed = dict(summary.departed)
        self.starts = Counter(summary.starts)
        self.lost = {}
        self._joined = {
            card.token: (number, summary.joined[number]) for number, card in self.members.items()
        }
        for number, card in members.items():
            if number not in self.members:
                _, why = self.departed.get(number, (card, Departure.LEFT))
                yield Change(What.LOST, card, why)
        for number, card in self.members.items():
            if number not in members:
                yield Change(What.INTRODUCED, card)
            if number in self.admitted - admitted:
                yield Change(What.ADMITTED, card)


def _shorten(remembered: dict[Any, Any]) -> None:
    """Keeps the last."""
    while len(remembered) > _REMEMBERED:
        del remembered[next(iter(remembered))]


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

"""What the news of a mesh say up to some place, in short: who is there."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from zrpc.card import Card
from zrpc.item import Departure
from zrpc.worker_info import RANKS

__all__ = ["Summary"]


@dataclass(frozen=True, slots=True)
class Summary:
    """What the news say up to some place.

    It is as long as the mesh is large. The numbers of all members that ever were are in there,
    but in runs: those of the ranks that are given one after the other take one line.

    Attributes:
        position: how many items it stands for.
        members: the cards of all that are accepted and not gone, by number.
        joined: which item brought them, by number.
        admitted: the numbers of those of them that can be found.
        departed: the cards of the last that are gone, and why, by number.
        starts: how many members each rank has had.
    """

    position: int
    members: Mapping[int, Card]
    joined: Mapping[int, int]
    admitted: frozenset[int]
    departed: Mapping[int, tuple[Card, Departure]]
    starts: Mapping[int, int]

    def dump(self) -> str:
        """The summary as text."""
        members = [
            [card.dump(), self.joined[number], number in self.admitted]
            for number, card in self.members.items()
        ]
        departed = [[card.dump(), why.value] for card, why in self.departed.values()]
        return json.dumps([self.position, members, departed, list(_runs(self.starts))])

    @classmethod
    def parse(cls, text: str) -> Summary:
        """Reads a summary that was written by `dump`.

        Raises:
            ValueError: it is none, or one of another version of zrpc.
        """
        try:
            position, members, departed, runs = json.loads(text)
            cards = [(Card.parse(card), int(at), bool(there)) for card, at, there in members]
            gone = [(Card.parse(card), Departure(why)) for card, why in departed]
            return cls(
                position=int(position),
                members={card.number: card for card, _, _ in cards},
                joined={card.number: at for card, at, _ in cards},
                admitted=frozenset(card.number for card, _, there in cards if there),
                departed={card.number: (card, why) for card, why in gone},
                starts=dict(_counts(runs)),
            )
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"expected a summary of a mesh's news: {error}") from None


def _counts(runs: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int]]:
    for first, end, count in runs:
        if not 0 <= first < end <= RANKS:
            raise ValueError(f"ranks from {first} to {end}")
        yield from ((rank, int(count)) for rank in range(first, end))


def _runs(counts: Mapping[int, int]) -> Iterator[list[int]]:
    """Numbers by rank as runs of equal ones: the first rank, the one after the last, the number."""
    run: list[int] = []
    for rank, count in sorted(counts.items()):
        if run and run[1:] == [rank, count]:
            run[1] = rank + 1
            continue
        if run:
            yield run
        run = [rank, rank + 1, count]
    if run:
        yield run

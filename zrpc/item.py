"""What workers tell each other in the news of a mesh: one item."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum

from zrpc.card import Card

__all__ = ["Departure", "Item", "Verb"]


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

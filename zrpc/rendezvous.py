"""How the workers of a mesh find each other: over any ``torch.distributed.Store``.

Each worker writes a card under its rank and reads those of all others. Since a store may
outlive a mesh (torchrun's does, a file may), and any worker may try again after a failure, a
card can be stale. So the workers then confirm that they have seen the same cards: each writes
a key that is named by all the cards' tokens, and a mesh stands once every rank has written the
same one. A card that is replaced meanwhile is read anew.

Rank 0, which may host the store, is the first to confirm. So a worker that loses the store knows
whether this was that of its own mesh, which rank 0 had joined and has left again, or may have been
that of an earlier one, whose host had yet to close it.

All that they write is signed with the cluster's secret (``zrpc.entries``). A signature says who
wrote a card but not when, so anybody who can write to the store can put an old one there. It is
treated as a stale one: its token is not of this run, so nobody confirms it, as a confirmation is
signed together with all tokens. A card that is signed otherwise is no card; a worker that meets
one leaves a *protest* for its author, who reads it where it is there to read: then both know.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from torch.distributed import DistNetworkError, Store

from zrpc.card import Card, claimed_token
from zrpc.entries import Entries
from zrpc.errors import AuthenticationError, RendezvousError
from zrpc.secret import ClusterSecret

__all__ = ["StoreLost", "exchange", "meet", "store_failed"]

logger = logging.getLogger(__name__)

# The store is asked again after a pause that grows from the first to the second number, in
# seconds. Its own wait() would be an event to await, but Ctrl-C does not end it, TCPStore logs
# each time-out of it as a network error, and FileStore's looks once a second.
_PAUSES = (0.001, 0.05)
# How long rank 0 stays for the others to read why there is no mesh, in seconds at most: one
# of them may have died.
_READ_WITHIN = 5.0
# How often a worker looks at the cards that are there while others are missing, in seconds.
_LOOK = 0.5


class StoreLost(RendezvousError):
    """The connection to the store was lost before its mesh stood; it may be an earlier one's."""


def meet(
    store: Store, card: Card, timeout: float, secret: ClusterSecret | None = None
) -> list[Card]:
    """Exchanges cards with all other ranks.

    Args:
        store: shared by all.
        card: this worker's.
        timeout: seconds.
        secret: signs the cards.

    Returns:
        The cards of all workers, by rank.

    Raises:
        RendezvousError: ranks are missing when the timeout passes; two workers have one name
            or one rank; the world sizes differ; the store fails.
        StoreLost: it is gone, and rank 0 had not confirmed this worker's card in it.
        AuthenticationError: a worker has another secret, or one has none; what is in the store
            is not from one of them.
    """
    meeting = _Meeting(Entries(store, secret), card, time.monotonic() + timeout, timeout)
    try:
        return meeting.run()
    except (RuntimeError, OSError) as error:
        if isinstance(error, (RendezvousError, AuthenticationError)):
            raise
        raise store_failed(error) from error


def store_failed(error: Exception) -> RendezvousError:
    """What to raise where a store fails while workers meet in it."""
    kind = StoreLost if isinstance(error, DistNetworkError) else RendezvousError
    return kind(f"the store failed during the rendezvous: {error}")


def _host_ended(cards: Sequence[Card], error: Exception) -> RendezvousError:
    host = cards[0].info
    return RendezvousError(
        f"expected all {len(cards)} workers to go on together once they had met, but lost their "
        f"store ({error}): what hosts it has ended, which is {host}, or the launcher where that "
        "hosts it; see what became of it"
    )


class _Meeting:
    """One call of `meet`."""

    def __init__(self, entries: Entries, card: Card, deadline: float, timeout: float) -> None:
        self._entries = entries
        self._card = card
        self._deadline = deadline
        self._timeout = timeout
        self._keys = [_card_key(rank) for rank in range(card.world_size)]
        # What stands in place of a card, by rank: the entry, and what is wrong with it.
        self._refused: dict[int, tuple[bytes, Exception]] = {}
        self._next_look = 0.0

    def run(self) -> list[Card]:
        self._entries.set(_card_key(self._card.rank), self._card.dump())
        while True:
            cards = self._gather()
            digest = _digest(cards)
            if self._confirmed(digest, cards):
                try:
                    _check(cards, self._card)
                except RendezvousError:
                    self._await_readers(digest)
                    raise
                return cards

    def _await_readers(self, digest: str) -> None:
        """Tells that this worker knows why there is no mesh; rank 0 waits for all to know.

        It may host the store, and what fails here often ends its program.
        """
        keys = [f"{digest}/{rank}/refused" for rank in range(self._card.world_size)]
        with contextlib.suppress(RuntimeError, OSError):  # the store is gone: nobody can wait
            self._entries.set(keys[self._card.rank], "1")
            if self._card.rank == 0:
                self._deadline = min(self._deadline, time.monotonic() + _READ_WITHIN)
                self._wait_for(lambda: self._entries.check(keys))

    def _gather(self) -> list[Card]:
        """Waits until there is a card of each rank."""
        cards: list[Card] = []

        def complete() -> bool:
            if self._entries.check(self._keys):
                cards[:] = self._read_cards()
            elif time.monotonic() > self._next_look:
                self._next_look = time.monotonic() + _LOOK
                self._read_present()
            return len(cards) == len(self._keys)

        if not self._wait_for(complete):
            raise self._incomplete()
        return cards

    def _read_cards(self) -> list[Card]:
        """The cards of all ranks, without those that are refused."""
        entries = self._entries.all_raw(self._keys)
        found = [self._read(rank, entry) for rank, entry in enumerate(entries)]
        mine = found[self._card.rank]
        if mine is None:
            raise AuthenticationError(
                f"the card of worker {self._card.name} (rank {self._card.rank}) was replaced: "
                f"{self._refused[self._card.rank][1]}"
            )
        if mine != self._card:
            raise RendezvousError(
                f"rank {mine.rank} is not unique: workers {self._card.name} and {mine.name} "
                "both have it"
            )
        return [card for card in found if card is not None]

    def _read_present(self) -> list[Card]:
        present = [rank for rank, key in enumerate(self._keys) if self._entries.check([key])]
        entries = self._entries.all_raw([self._keys[rank] for rank in present])
        found = [self._read(*pair) for pair in zip(present, entries, strict=True)]
        return [card for card in found if card is not None]

    def _read(self, rank: int, entry: bytes) -> Card | None:
        """The card in an entry; None, and a protest, where it is no member's."""
        try:
            card = Card.parse(self._entries.opened(self._keys[rank], entry))
            if card.number != rank:
                raise ValueError(f"expected the card of rank {rank}, found that of {card.number}")
        except (AuthenticationError, ValueError) as error:
            self._refuse(rank, entry, error)
            return None
        self._refused.pop(rank, None)
        return card

    def _refuse(self, rank: int, entry: bytes, error: Exception) -> None:
        token = claimed_token(entry)
        if rank not in self._refused or self._refused[rank][0] != entry:
            self._refused[rank] = entry, error
            logger.warning(
                "%s refuses what claims to be worker %d: %s", self._card.info, rank, error
            )
            if token:
                self._entries.set(_protest_key(token, self._card.token), "refused")
        if token and self._entries.check([_protest_key(self._card.token, token)]):
            self._leave_together(token)
            raise AuthenticationError(
                f"worker {self._card.name} (rank {self._card.rank}) and the worker of rank {rank} "
                f"refuse each other: {error}"
            )

    def _leave_together(self, token: str) -> None:
        """Waits a moment for the other to have read the protest too: this one may be the host."""
        self._entries.set(f"heard/{self._card.token}/{token}", "heard")
        self._deadline = min(self._deadline, time.monotonic() + _LOOK)
        self._wait_for(lambda: self._entries.check([f"heard/{token}/{self._card.token}"]))

    def _confirmed(self, digest: str, cards: list[Card]) -> bool:
        """Confirms these cards after rank 0, and waits until all have; False if one was replaced.

        Raises:
            RendezvousError: some did not in time; the store is gone, and rank 0 had confirmed.
        """
        keys = {f"{digest}/{card.rank}": card for card in cards}
        first, mine = f"{digest}/0", f"{digest}/{self._card.rank}"
        if mine != first and not self._all_see({first: keys.pop(first)}, cards):
            return False
        try:
            self._entries.set(mine, "met")
            del keys[mine]
            # Of two workers both have confirmed: rank 0 may be back already, and gone.
            return not keys or self._all_see(keys, cards)
        except DistNetworkError as error:
            if mine == first:
                raise
            raise _host_ended(cards, error) from error

    def _all_see(self, keys: dict[str, Card], cards: list[Card]) -> bool:
        """Waits until some workers have confirmed the cards; False where one was replaced."""
        replaced = False

        def seen() -> bool:
            nonlocal replaced
            if self._entries.check(list(keys)):
                return True
            replaced = self._read_cards() != cards
            return replaced

        if self._wait_for(seen):
            if not replaced:
                for key in keys:  # a confirmation that was not written by its rank is none
                    self._entries.get(key)
            return not replaced
        _check(cards, self._card)
        late = [card.info for key, card in keys.items() if not self._entries.check([key])]
        raise RendezvousError(
            f"expected {len(cards)} workers within {self._timeout:g} s, but {late} left again, "
            "or are from an earlier run: start them again"
        )

    def _incomplete(self) -> RendezvousError | AuthenticationError:
        cards = self._read_present()
        with_other_size = [card for card in cards if card.world_size != self._card.world_size]
        if with_other_size:
            return _other_size(with_other_size[0], self._card)
        if self._refused:
            rank, (_, error) = next(iter(self._refused.items()))
            return AuthenticationError(
                f"expected {len(self._keys)} workers within {self._timeout:g} s, but what claims "
                f"to be ranks {sorted(self._refused)} was refused. Rank {rank}: {error}"
            )
        missing = sorted(set(range(len(self._keys))) - {card.rank for card in cards})
        return RendezvousError(
            f"expected {len(self._keys)} workers within {self._timeout:g} s, but ranks {missing} "
            "are missing: start them, or check RANK and WORLD_SIZE"
        )

    def _wait_for(self, done: Callable[[], bool]) -> bool:
        return _wait_for(done, self._deadline)


def _wait_for(done: Callable[[], bool], deadline: float) -> bool:
    """Waits until ``done()``; False at the deadline."""
    pause, longest = _PAUSES
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, longest)
    return True


def _protest_key(against: str, by: str) -> str:
    return f"protest/{against}/{by}"


def _card_key(rank: int) -> str:
    return f"card/{rank}"


def _digest(cards: Iterable[Card]) -> str:
    return hashlib.sha256("".join(card.dump() for card in cards).encode()).hexdigest()


def _check(cards: list[Card], mine: Card) -> None:
    by_name: dict[str, Card] = {}
    for card in cards:
        if card.world_size != mine.world_size:
            raise _other_size(card, mine)
        other = by_name.setdefault(card.name, card)
        if other is not card:
            raise RendezvousError(
                f"worker name {card.name} is not unique: ranks {other.rank} and {card.rank} "
                "both have it"
            )


def _other_size(card: Card, mine: Card) -> RendezvousError:
    return RendezvousError(
        f"worker {card.name} (rank {card.rank}) expects a world of {card.world_size} workers, "
        f"but worker {mine.name} (rank {mine.rank}) one of {mine.world_size}"
    )


def exchange(
    store: Store,
    cards: Sequence[Card],
    rank: int,
    value: str,
    timeout: float,
    secret: ClusterSecret | None = None,
) -> list[str]:
    """A second round among workers that have met: each gives a value, all get all of them.

    Raises:
        AuthenticationError: a value is not of the worker that it claims to be of.
        RendezvousError: some gave none within ``timeout`` seconds, or the store fails.
    """
    try:
        return _exchange(Entries(store, secret), cards, rank, value, timeout)
    except (RuntimeError, OSError) as error:
        if isinstance(error, (RendezvousError, AuthenticationError)):
            raise
        raise _host_ended(cards, error) from error


def _exchange(
    entries: Entries, cards: Sequence[Card], rank: int, value: str, timeout: float
) -> list[str]:
    keys = [f"{_digest(cards)}/value/{card.rank}" for card in cards]
    entries.set(keys[rank], value)
    if not _wait_for(lambda: entries.check(keys), time.monotonic() + timeout):
        missing = [
            card.info for key, card in zip(keys, cards, strict=True) if not entries.check([key])
        ]
        raise RendezvousError(
            f"expected all workers to say within {timeout:g} s where they listen, but {missing} "
            "did not: see what became of them"
        )
    return [entries.get(key) for key in keys]

"""Who is in the mesh: names, ranks, and who is gone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from zrpc.card import Card
from zrpc.errors import RpcError
from zrpc.transport.network import bulk_identity
from zrpc.worker_info import WorkerInfo, incarnation_of, rank_of

__all__ = ["Membership"]


class Membership:
    """The workers of one mesh, as one of them sees them, by their numbers (`zrpc.worker_info`).

    A worker that comes to a running mesh is *introduced* first: its messages are known for its
    own. It can be found only once it is *admitted*, when it is introduced everywhere. So whoever
    hears of it, by a reference that somebody passes on, can reach it.

    Args:
        cards: of all workers that are there.
        rank: this worker's number.

    Attributes:
        cards: of all that were ever introduced, by number.
        infos: likewise.
        awaited: the numbers of those that have been introduced and not admitted.
        lost: the numbers of those that are gone.
        starts: how many members each rank had before this worker came, as far as some of them may
            be gone that it was never told of.

    The look-ups may be called from any thread, what changes anything from one.
    """

    def __init__(self, cards: Iterable[Card], rank: int) -> None:
        self.cards = {card.number: card for card in cards}
        self.infos = {card.number: card.info for card in self.cards.values()}
        self.rank = rank
        self.awaited: set[int] = set()
        self.lost: set[int] = set()
        self.starts: Mapping[int, int] = {}
        self._found = set(self.infos)  # those that could be found at any time
        self._living = set(self.infos)  # those of them that are not gone
        self._by_name = {info.name: info for info in self.infos.values()}
        self._by_rank = {info.id: info for info in self.infos.values()}
        self._ranks = {i: card.number for card in self.cards.values() for i in _identities(card)}
        own = self.cards[rank]
        self._same_main = {number: card.same_main(own) for number, card in self.cards.items()}
        self._awaited_ranks: dict[bytes, int] = {}
        self._lost_ranks: dict[bytes, int] = {}

    @property
    def info(self) -> WorkerInfo:
        """This worker."""
        return self.infos[self.rank]

    @property
    def living(self) -> list[int]:
        """The numbers of all workers that can be found and are not gone."""
        return sorted(self._living.copy())

    def introduce(self, card: Card) -> None:
        """A worker is about to come."""
        number = card.number
        self._same_main[number] = card.same_main(self.cards[self.rank])
        self.cards[number] = card
        self.awaited.add(number)
        for identity in _identities(card):
            self._awaited_ranks[identity] = number
        self.infos[number] = card.info

    def admit(self, number: int) -> bool:
        """A worker has come, and can be found from now on; False where that was known."""
        if number not in self.awaited:
            return False
        info = self.infos[number]
        for identity in _identities(self.cards[number]):
            del self._awaited_ranks[identity]
            self._ranks[identity] = number
        self.awaited.discard(number)
        self._found.add(number)
        self._living.add(number)
        self._by_rank[info.id] = info
        self._by_name[info.name] = info
        return True

    def find(self, to: str | int | WorkerInfo) -> WorkerInfo:
        """The worker that ``to`` names.

        Raises:
            RpcError: there is none.
            ValueError: ``to`` is no name, rank or WorkerInfo.
        """
        if isinstance(to, WorkerInfo):
            found = self._by_rank.get(to.id)
            if found == to:
                return found
        elif isinstance(to, str):
            if to in self._by_name:
                return self._by_name[to]
        elif isinstance(to, int):
            if to in self._by_rank:
                return self._by_rank[to]
        else:
            raise ValueError(f"Cannot get WorkerInfo from name {to}")
        infos = list(self._by_rank.values())
        names = ", ".join(info.name for info in infos[:8])
        more = f" and {len(infos) - 8} more" if len(infos) > 8 else ""
        raise RpcError(f"could not find destination {to!r}: the workers are {names}{more}")

    def rank_of(self, identity: bytes) -> int | None:
        """The number of the member with this routing id; None for who is not admitted, or lost,
        or a stranger.
        """
        return self._ranks.get(identity)

    def awaited_rank_of(self, identity: bytes) -> int | None:
        """The number of a worker that is introduced and not admitted; None for any other."""
        return self._awaited_ranks.get(identity)

    def lost_rank_of(self, identity: bytes) -> int | None:
        """The number of a worker that is lost; None for a member or a stranger."""
        return self._lost_ranks.get(identity)

    def lose(self, rank: int) -> None:
        """A worker is gone, for good: should it be heard again, it is no member any more."""
        for identity in _identities(self.cards[rank]):
            self._lost_ranks[identity] = rank
            self._ranks.pop(identity, None)
            self._awaited_ranks.pop(identity, None)
        self.lost.add(rank)
        self._living.discard(rank)
        self.awaited.discard(rank)

    def recall(self, number: int) -> Card | None:
        """A card in place of that of a worker which was gone before this one came.

        Others may still speak of it.

        Returns:
            None where there was no such worker.
        """
        rank, incarnation = rank_of(number), incarnation_of(number)
        if number in self.cards or incarnation >= self.starts.get(rank, 0):
            return None
        token = f"{number:032x}"  # drawn by nobody
        return Card("departed", rank, 0, token, "", "", "", incarnation=incarnation)

    def was_found(self, number: int) -> bool:
        """Whether a worker is, or was, more than about to come."""
        return number in self._found

    def same_main(self, rank: int) -> bool:
        """Whether a name in ``__main__`` means the same at this worker and at that one."""
        return self._same_main[rank]

    def shares_host(self, rank: int) -> bool:
        """Whether this worker can see that one's private directory."""
        return self.cards[self.rank].shares_host(self.cards[rank])

    def reaches_by_ipc(self, rank: int) -> bool:
        """Whether the two talk by Unix sockets."""
        return self.cards[self.rank].reaches_by_ipc(self.cards[rank])


def _identities(card: Card) -> tuple[bytes, bytes]:
    """The routing ids of a worker's mailboxes."""
    return card.identity, bulk_identity(card.identity)

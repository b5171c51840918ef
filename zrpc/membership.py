"""Who is in the mesh: names, ranks, and who is gone."""

from __future__ import annotations

from collections.abc import Sequence

from zrpc.card import Card
from zrpc.errors import RpcError
from zrpc.transport.network import bulk_identity
from zrpc.worker_info import WorkerInfo

__all__ = ["Membership"]


class Membership:
    """The workers of one mesh, as one of them sees them.

    Args:
        cards: of all workers, by rank.
        rank: this worker's.

    The look-ups may be called from any thread, `lose` from one.
    """

    def __init__(self, cards: Sequence[Card], rank: int) -> None:
        self.cards = cards
        self.infos = [card.info for card in cards]
        self.rank = rank
        self._by_name = {info.name: info for info in self.infos}
        self._ranks = {identity: card.rank for card in cards for identity in _identities(card)}
        self._same_main = [card.main == cards[rank].main for card in cards]
        self._lost_ranks: dict[bytes, int] = {}
        self.lost: set[int] = set()

    @property
    def info(self) -> WorkerInfo:
        """This worker."""
        return self.infos[self.rank]

    @property
    def living(self) -> list[int]:
        """The ranks of all workers that are not gone."""
        return [info.id for info in self.infos if info.id not in self.lost]

    def find(self, to: str | int | WorkerInfo) -> WorkerInfo:
        """The worker that ``to`` names.

        Raises:
            RpcError: there is none.
            ValueError: ``to`` is no name, rank or WorkerInfo.
        """
        if isinstance(to, WorkerInfo):
            found = self.infos[to.id] if 0 <= to.id < len(self.infos) else None
            if found == to:
                return found
        elif isinstance(to, str):
            if to in self._by_name:
                return self._by_name[to]
        elif isinstance(to, int):
            if 0 <= to < len(self.infos):
                return self.infos[to]
        else:
            raise ValueError(f"Cannot get WorkerInfo from name {to}")
        names = ", ".join(info.name for info in self.infos[:8])
        more = f" and {len(self.infos) - 8} more" if len(self.infos) > 8 else ""
        raise RpcError(f"could not find destination {to!r}: the workers are {names}{more}")

    def rank_of(self, identity: bytes) -> int | None:
        """The rank of the member with this routing id; None for who is lost, or a stranger."""
        return self._ranks.get(identity)

    def lost_rank_of(self, identity: bytes) -> int | None:
        """The rank of a worker that is lost; None for a member or a stranger."""
        return self._lost_ranks.get(identity)

    def lose(self, rank: int) -> None:
        """A worker is gone, for good: should it be heard again, it is no member any more."""
        for identity in _identities(self.cards[rank]):
            self._lost_ranks[identity] = rank
            self._ranks.pop(identity, None)
        self.lost.add(rank)

    def same_main(self, rank: int) -> bool:
        """Whether a name in ``__main__`` means the same at this worker and at that one."""
        return self._same_main[rank]

    def shares_host(self, rank: int) -> bool:
        """Whether this worker can see that one's private directory."""
        mine, other = self.cards[self.rank], self.cards[rank]
        return bool(mine.directory and other.directory) and mine.host_key == other.host_key

    def reaches_by_ipc(self, rank: int) -> bool:
        """Whether the two talk by Unix sockets."""
        return self.shares_host(rank) and self.cards[self.rank].ipc and self.cards[rank].ipc


def _identities(card: Card) -> tuple[bytes, bytes]:
    """The routing ids of a worker's mailboxes."""
    return card.identity, bulk_identity(card.identity)

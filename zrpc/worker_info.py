"""Who a worker is: its name and its rank, and which of its incarnations.

Where a worker is started again under its name and rank, or another one takes the rank of one
that is gone, it is another *member* of the mesh: a new incarnation. Everything that is kept or
sent about a member goes by its *number*, in which the rank is the lower bits and the incarnation
the higher ones. So nothing that is about one incarnation is ever taken for another's. In a mesh in
which nobody was ever replaced, the numbers are the ranks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

__all__ = ["INCARNATIONS", "RANKS", "WorkerInfo", "incarnation_of", "number_of", "rank_of"]

_RANK_BITS = 15
# How many ranks there can be, and incarnations of each. The rank has its own 15 bits in the id
# of a context of autograd too; a number fits into 32.
RANKS = 1 << _RANK_BITS
INCARNATIONS = 1 << 16

_NAME = re.compile(r"[A-Za-z0-9_:-]{1,127}\Z")


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """The name and the id (rank) of one worker.

    Pass it as ``to`` of a call in place of the name: it is hashable, comparable, picklable
    and immutable, hence safe in any thread.

    Args:
        name: letters, digits, ``-``, ``_`` and ``:``, from 1 to 127 characters.
        id: the worker's rank, from 0.
        incarnation: how many members of the mesh have had this rank before. Two that differ in
            nothing else are equal: both name whoever has the name and the rank now.

    Raises:
        RuntimeError: the name has another form.

    Example:
        >>> WorkerInfo("trainer", 1)
        WorkerInfo(id=1, name=trainer)

    See also ``torch.distributed.rpc.WorkerInfo``.
    """

    name: str
    id: int
    incarnation: int = field(default=0, compare=False)
    # Which member of the mesh: unlike the rank, it never means another one.
    number: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.match(self.name):
            raise RuntimeError(
                "Worker name must match ^[A-Za-z0-9-_:]*$, and must be non-empty and shorter "
                f"than 128 chars, but got {self.name!r}"
            )
        object.__setattr__(self, "number", number_of(self.id, self.incarnation))

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"


def number_of(rank: int, incarnation: int) -> int:
    """The number of a member."""
    return incarnation << _RANK_BITS | rank


def rank_of(number: int) -> int:
    """The rank of the member with a number."""
    return number & (RANKS - 1)


def incarnation_of(number: int) -> int:
    """The incarnation of the member with a number."""
    return number >> _RANK_BITS

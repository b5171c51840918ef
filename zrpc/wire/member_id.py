"""Which member of a mesh: a number that no other worker ever has.

If a worker is started again under its name and rank, or if another worker takes a rank that has
become free, the new worker is another *member* of the mesh: a new incarnation of that rank. All
state and all messages about a member go by its id. Its lower bits are the rank, its higher bits the
incarnation. So nothing about one incarnation is ever taken for another's. In a mesh in which no
worker was ever replaced, the ids are equal to the ranks.
"""

from __future__ import annotations

from typing import NewType

MemberId = NewType("MemberId", int)

# In place of an id: no member has it.
NOBODY = MemberId(-1)

_RANK_BITS = 15
# How many ranks there can be, and how many incarnations of each. The rank also has 15 bits of its
# own in the id of an autograd context. A member id fits into 32 bits.
RANKS = 1 << _RANK_BITS
INCARNATIONS = 1 << 16


def member_id_of(rank: int, incarnation: int) -> MemberId:
    """The id of a member.

    Example:
        >>> member_id_of(rank=1, incarnation=1)
        32769
    """
    return MemberId(incarnation << _RANK_BITS | rank)


def rank_of(member: MemberId) -> int:
    """The rank of a member."""
    return member & (RANKS - 1)


def incarnation_of(member: MemberId) -> int:
    """The incarnation of a member: how many members had its rank before it."""
    return member >> _RANK_BITS

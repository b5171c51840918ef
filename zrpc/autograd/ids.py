"""The ids of contexts and of passes, which are unique in a mesh."""

from __future__ import annotations

from zrpc.worker_info import INCARNATIONS, incarnation_of, number_of, rank_of

__all__ = ["creator", "first_id"]

# Of an id of a context or a pass: what is left of 48 bits by the incarnation.
_COUNT_BITS = 32


def first_id(number: int) -> int:
    """The first id of a context or a pass that a member draws: as torch's, the rank above 48 bits
    of a count, which begins anew with each incarnation, and elsewhere.
    """
    return (rank_of(number) << 48) + (incarnation_of(number) << _COUNT_BITS)


def creator(drawn: int) -> int:
    """The number of the member that has drawn an id."""
    return number_of(drawn >> 48, (drawn >> _COUNT_BITS) & (INCARNATIONS - 1))

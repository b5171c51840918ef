"""The names of references and of their forks."""

from __future__ import annotations

from typing import NamedTuple

from zrpc.worker_info import incarnation_of, rank_of

__all__ = ["NO_FORK", "ForkId", "GloballyUniqueId", "RRefId"]


class GloballyUniqueId(NamedTuple):
    """A number that is unique in a mesh: which worker drew it, and that worker's count.

    Attributes:
        created_on: the worker's number, which no other incarnation has (`zrpc.worker_info`).
        local_id: the count.
    """

    created_on: int
    local_id: int

    def __repr__(self) -> str:
        again = incarnation_of(self.created_on)
        of = f", incarnation={again}" if again else ""
        return (
            f"GloballyUniqueId(created_on={rank_of(self.created_on)}{of}, local_id={self.local_id})"
        )


# The value that is referred to, and one user's reference to it.
RRefId = GloballyUniqueId
ForkId = GloballyUniqueId

# Stands where there is no fork: no worker has this rank.
NO_FORK = GloballyUniqueId(2**32 - 1, 0)

"""The names of references and of their forks."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["NO_FORK", "ForkId", "GloballyUniqueId", "RRefId"]


class GloballyUniqueId(NamedTuple):
    """A number that is unique in a mesh: which worker drew it, and that worker's count."""

    created_on: int
    local_id: int

    def __repr__(self) -> str:
        return f"GloballyUniqueId(created_on={self.created_on}, local_id={self.local_id})"


# The value that is referred to, and one user's reference to it.
RRefId = GloballyUniqueId
ForkId = GloballyUniqueId

# Stands where there is no fork: no worker has this rank.
NO_FORK = GloballyUniqueId(2**32 - 1, 0)

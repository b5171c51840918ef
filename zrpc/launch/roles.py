"""The roles of workers, such as one learner and four rollouts, and their names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

_NAME = re.compile(r"[A-Za-z0-9_:-]{1,120}")


@dataclass(frozen=True)
class Member:
    """One worker: its role, and its name, which is the role and a number."""

    role: str
    name: str


class Roles(tuple[Member, ...]):
    """The workers by rank.

    Example:
        >>> [member.name for member in Roles.of({"learner": 1, "rollout": 2})]
        ['learner0', 'rollout0', 'rollout1']
    """

    __slots__ = ()

    @classmethod
    def of(cls, counts: Mapping[str, int]) -> Self:
        """Makes the workers of each role, which are counted from 0.

        Args:
            counts: the number of workers of each role.

        Raises:
            ValueError: a number is below 1, a role can't be part of a worker's name, or two workers
                would have one name.
        """
        for role, count in counts.items():
            if not _NAME.fullmatch(role):
                raise ValueError(
                    "expected a role of 1 to 120 letters, digits, '-', '_' and ':', but got "
                    f"{role!r}"
                )
            if count < 1:
                raise ValueError(f"expected 1 worker or more of the role {role}, but got {count}")
        found = cls(Member(role, f"{role}{i}") for role, n in counts.items() for i in range(n))
        names = [member.name for member in found]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"two workers would have the name {twice[0]}: give the roles {sorted(counts)} "
                "other names, such as ones that end with a letter"
            )
        return found

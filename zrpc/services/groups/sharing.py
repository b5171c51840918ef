"""Which item goes to which member of a group next. No I/O in here."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

M = TypeVar("M", bound=Hashable)


class Sharing(Generic[M]):
    """Items that are given out to members, one at a time to each. For one thread at a time.

    Args:
        items: how many there are; they are known by their numbers.
        members: those that are free, first the one to be used first.
    """

    def __init__(self, items: int, members: Iterable[M]) -> None:
        self._waiting = deque(range(items))
        self._free = deque(members)
        self._busy: dict[int, M] = {}

    @property
    def stuck(self) -> bool:
        """Whether items wait that nobody will ever take, unless a member joins."""
        return bool(self._waiting) and not self._free and not self._busy

    def next(self) -> tuple[int, M] | None:
        """Gives the next item to a member that is free; None if there is no item or no member."""
        if not self._waiting or not self._free:
            return None
        item, member = self._waiting.popleft(), self._free.popleft()
        self._busy[item] = member
        return item, member

    def end(self, item: int, *, lost: bool = False, again: bool = False) -> None:
        """Notes that a member is done with its item.

        Args:
            item: the item.
            lost: whether the member takes no more items.
            again: whether the item was not begun, so that another member gets it.
        """
        member = self._busy.pop(item)
        if not lost:
            self._free.append(member)
        if again:
            self._waiting.appendleft(item)

    def join(self, member: M) -> None:
        """Adds a member, which is free."""
        self._free.append(member)

    def stop(self) -> list[int]:
        """Gives out no more items; returns those that are left."""
        left = list(self._waiting)
        self._waiting.clear()
        return left

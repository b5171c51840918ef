"""Which calls become a batch, and when. No I/O in here.

Calls wait in the order in which they arrived. A *run* is one call of the function. It is ordered
when a call has waited ``max_wait`` seconds, or when there are enough calls to fill it. It takes its
calls only when it begins, which may be later, if all threads are busy. So until then, calls may
join or leave, and a run whose calls have all left finds none.
"""

from __future__ import annotations

from itertools import islice
from typing import Any, Generic, TypeVar

C = TypeVar("C")


class Gathering(Generic[C]):
    """The calls that wait for one function, and may be in one batch. For one thread at a time.

    Args:
        max_size: the most calls in a batch.
        max_wait: how long a call waits before a run is ordered that will take it; in seconds.
        key: what is equal for all these calls.

    Attributes:
        key: the same.

    Example:
        >>> gathering = Gathering(max_size=2, max_wait=1.0)
        >>> gathering.add("a", now=5.0), gathering.due(), gathering.add("b", now=5.5)
        (False, 6.0, True)
        >>> gathering.take()
        ['a', 'b']
    """

    def __init__(self, max_size: int, max_wait: float, key: Any = None) -> None:
        self.key = key
        self._max_size = max_size
        self._max_wait = max_wait
        self._waiting: dict[C, float] = {}  # when each must be in an ordered run; oldest first
        self._ordered = 0  # runs that have not begun

    @property
    def idle(self) -> bool:
        """Whether nothing waits here, neither calls nor runs."""
        return not (self._waiting or self._ordered)

    def add(self, call: C, now: float) -> bool:
        """Adds a call; returns whether a run must be ordered now."""
        self._waiting[call] = now + self._max_wait
        full = len(self._waiting) >= (self._ordered + 1) * self._max_size
        return (full or not self._max_wait) and self._order()

    def remove(self, call: C) -> None:
        """Removes a call, if it is still here: its caller no longer waits."""
        self._waiting.pop(call, None)

    def due(self) -> float | None:
        """Returns when the next run must be ordered; None if the ordered ones take all calls."""
        covered = self._ordered * self._max_size
        if covered >= len(self._waiting):
            return None
        return next(islice(self._waiting.values(), covered, None))

    def expire(self, now: float) -> bool:
        """Returns whether a run must be ordered now, since one is due."""
        due = self.due()
        return due is not None and due <= now and self._order()

    def order_all(self) -> int:
        """Returns how many runs must be ordered now to take all calls."""
        before = self._ordered
        while self._order():
            pass
        return self._ordered - before

    def take(self) -> list[C]:
        """Begins an ordered run; returns its calls, the oldest first."""
        self._ordered -= 1
        calls = list(islice(self._waiting, self._max_size))
        for call in calls:
            del self._waiting[call]
        return calls

    def _order(self) -> bool:
        if self._ordered * self._max_size >= len(self._waiting):
            return False  # the ordered runs take all
        self._ordered += 1
        return True

"""How many calls there were, by function, and how long they took: at the caller and at the callee.

No lock: several threads count at once. An increment is a few instructions between which CPython
does not switch threads: it does so only at calls and at the ends of loops. So what is called, such
as ``frexp``, is called first, and none is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import frexp
from typing import TypeVar

# The upper bounds of a histogram's buckets, in seconds: from 1 us to 2 minutes. A last bucket takes
# what is longer.
BUCKET_SECONDS = tuple(2.0**exponent for exponent in range(-20, 8))
# Names beyond this number are counted together: programs may make functions without end.
MAX_NAMES = 1000
OTHERS = "(others)"

# The slot of a time is its exponent, as `frexp` has it, and this.
_OFFSET = 40
_SLOTS = 96
# The slot of the first bucket.
_FIRST = _OFFSET - 20
# A time of 0 has the exponent 0 in `frexp`, which is that of a second.
_LEAST_SECONDS = 1e-9


def quantile(histogram: Sequence[int], q: float) -> float:
    """Returns the time, in seconds, within which this share of the calls of a histogram ended."""
    wanted = q * sum(histogram)
    lower = 0.0
    uppers = (*BUCKET_SECONDS, 2 * BUCKET_SECONDS[-1])
    for upper, count in zip(uppers, histogram, strict=True):
        if count and wanted <= count:
            return lower + (upper - lower) * wanted / count
        wanted -= count
        lower = upper
    return 0.0


class CallCount:
    """The calls of one function, at the caller.

    Attributes:
        errors: the number of those that failed.
        seconds: how long all of them took, until their answers arrived.
    """

    __slots__ = ("_slots", "errors", "seconds")

    def __init__(self) -> None:
        self.errors = 0
        self.seconds = 0.0
        self._slots = [0] * _SLOTS

    def add(self, seconds: float, failed: bool) -> None:
        """Counts a call."""
        self._slots[frexp(seconds + _LEAST_SECONDS)[1] + _OFFSET] += 1
        self.seconds += seconds
        if failed:
            self.errors += 1

    def histogram(self) -> list[int]:
        """Returns the number of calls in each bucket, see `BUCKET_SECONDS`."""
        slots = self._slots.copy()
        last = _FIRST + len(BUCKET_SECONDS)
        return [sum(slots[: _FIRST + 1]), *slots[_FIRST + 1 : last], sum(slots[last:])]


class HandlerCount:
    """The executions of one function, at the callee.

    Attributes:
        number: how many there were.
        errors: the number of those that failed.
        queue_seconds: how long all of them waited for a thread, or for an RRef's value.
        run_seconds: how long all of them ran, until their answers were packed.
    """

    __slots__ = ("errors", "number", "queue_seconds", "run_seconds")

    def __init__(self) -> None:
        self.number = self.errors = 0
        self.queue_seconds = self.run_seconds = 0.0

    def add(self, queue_seconds: float, run_seconds: float, failed: bool) -> None:
        """Counts an execution."""
        self.number += 1
        self.queue_seconds += queue_seconds
        self.run_seconds += run_seconds
        if failed:
            self.errors += 1


C = TypeVar("C")
# A function's name, or the kind of a request that has none.
Key = str | int


class Table(dict[Key, C]):
    """A row of counts for each function: ``table[name]``. Any thread may read and copy it.

    Args:
        make_row: makes a row without counts.
    """

    def __init__(self, make_row: Callable[[], C]) -> None:
        super().__init__()
        self._make_row = make_row

    def __missing__(self, key: Key) -> C:
        """Returns the row of a function that has none yet."""
        # Single operations on a dict are atomic.
        return self.setdefault(key if len(self) < MAX_NAMES else OTHERS, self._make_row())

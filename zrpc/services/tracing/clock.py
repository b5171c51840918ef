"""How much the clocks of workers differ, found from the messages between them. No I/O in here.

An exchange is a request and its answer, with four times, as in NTP: it was sent and its answer
returned on the clock of one worker, and it was received and answered on that of the other. No
message arrives before it was sent. So each exchange says between which bounds the difference of the
two clocks lies, and all of them together say it more closely. The middle of these bounds is taken.
But if they include 0, the clocks are taken for the same: those of workers on one host are.

If the bounds contradict each other, the clocks have drifted: then the fastest exchange counts, and
the error includes how far the clocks have drifted at least. Clocks that NTP disciplines drift by
microseconds a minute.
Workers that have not called each other are compared by way of others.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import NamedTuple


class Offset(NamedTuple):
    """How far a clock is ahead of another one, and how far off that may be, in seconds."""

    seconds: float
    error: float


@dataclass(slots=True)
class _Bounds:
    """What is known of how far one clock is ahead of another."""

    low: float = float("-inf")
    high: float = float("inf")
    fastest: tuple[float, float] = (float("-inf"), float("inf"))

    def narrow(self, low: float, high: float) -> None:
        self.low, self.high = max(self.low, low), min(self.high, high)
        if high - low < self.fastest[1] - self.fastest[0]:
            self.fastest = low, high

    def offset(self) -> Offset:
        low, high = (self.low, self.high) if self.low <= self.high else self.fastest
        drift = max(0.0, self.low - self.high)
        if low <= 0 <= high:
            return Offset(0.0, max(-low, high) + drift)
        return Offset((low + high) / 2, (high - low) / 2 + drift)


class Clocks:
    """The clocks of several workers, which are known by their numbers."""

    def __init__(self) -> None:
        self._bounds: dict[tuple[int, int], _Bounds] = {}

    def add(
        self,
        caller: int,
        callee: int,
        sent: float,
        received: float,
        answered: float,
        returned: float,
    ) -> None:
        """Adds an exchange: the first and last time are the caller's, the others the callee's."""
        if caller == callee:
            return
        low, high = answered - returned, received - sent
        if caller > callee:
            caller, callee, low, high = callee, caller, -high, -low
        self._bounds.setdefault((caller, callee), _Bounds()).narrow(low, high)

    def offsets(self, reference: int) -> dict[int, Offset]:
        """Returns how far each clock is ahead of that of ``reference``.

        Workers that are connected with it by no exchange, not even by way of others, are left out.
        """
        steps: dict[int, dict[int, Offset]] = {}
        for (one, other), bounds in self._bounds.items():
            offset = bounds.offset()
            steps.setdefault(one, {})[other] = offset
            steps.setdefault(other, {})[one] = Offset(-offset.seconds, offset.error)
        found: dict[int, Offset] = {}
        # The way with the smallest error, as in Dijkstra's algorithm.
        open_ways = [(0.0, reference, 0.0)]
        while open_ways:
            error, worker, seconds = heapq.heappop(open_ways)
            if worker in found:
                continue
            found[worker] = Offset(seconds, error)
            for other, step in steps.get(worker, {}).items():
                heapq.heappush(open_ways, (error + step.error, other, seconds + step.seconds))
        return found

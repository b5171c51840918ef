"""How often a workload is repeated, and what comes of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Effort", "Sample"]


@dataclass(frozen=True)
class Sample:
    """One row, measured in one mesh.

    Attributes:
        value: the median over the repeats; seconds, a number per second, or bytes.
        worst: the worst of them.
        repeats: how many there were.
    """

    value: float
    worst: float
    repeats: int


@dataclass(frozen=True)
class Effort:
    """How much to measure.

    Attributes:
        seconds: for how long to repeat a workload; a quarter of it before, to warm up.
        least: how often at least, however long it takes.
        scale: what the sizes of batches are multiplied by; below 1 in tests.
    """

    seconds: float = 0.3
    least: int = 5
    scale: float = 1.0

    def scaled(self, count: int) -> int:
        """The size of a batch that has ``count`` elements at full effort."""
        return max(1, round(count * self.scale))

    def time(self, once: Callable[[], object]) -> Sample:
        """How many seconds a call of ``once`` takes."""
        self._repeat(once, self.seconds / 4, min(2, self.least))
        times = self._repeat(once, self.seconds, self.least)
        return Sample(statistics.median(times), max(times), len(times))

    def rate(self, batch: Callable[[], object], count: int) -> Sample:
        """How many things are done per second where a call of ``batch`` does ``count``."""
        taken = self.time(batch)
        return Sample(count / taken.value, count / taken.worst, taken.repeats)

    @staticmethod
    def _repeat(once: Callable[[], object], seconds: float, least: int) -> list[float]:
        clock = time.perf_counter
        times: list[float] = []
        before = clock()
        end = before + seconds
        while before < end or len(times) < least:
            once()
            after = clock()
            times.append(after - before)
            before = clock()  # keeping the time is no part of it
        return times

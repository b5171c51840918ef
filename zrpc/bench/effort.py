"""How often a workload is repeated, and what comes of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

__all__ = ["Effort", "Sample"]


@dataclass(frozen=True)
class Sample:
    """One row, measured in one mesh.

    Attributes:
        value: the median over the repeats, of several turns the median of theirs; in seconds,
            a number per second, or bytes.
        worst: the worst of them.
        repeats: how many there were.
    """

    value: float
    worst: float
    repeats: int

    @classmethod
    def merged(cls, samples: Sequence[Sample], more_is_better: bool) -> Sample:
        """One sample of several turns, each of which counts as much as the others."""
        worst = min if more_is_better else max
        return cls(
            statistics.median(sample.value for sample in samples),
            worst(sample.worst for sample in samples),
            sum(sample.repeats for sample in samples),
        )


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

    def divided(self, turns: int) -> Effort:
        """The effort of each turn where there are several."""
        return replace(self, seconds=self.seconds / turns, least=-(-self.least // turns))

    def scaled(self, count: int) -> int:
        """The size of a batch that has ``count`` elements at full effort."""
        return max(1, round(count * self.scale))

    def time(self, once: Callable[[], object]) -> Sample:
        """How many seconds a call of ``once`` takes."""
        self._repeat(once, self.seconds / 4, 1)
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

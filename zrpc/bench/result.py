"""What was measured: by row, by participant, by round."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from zrpc.bench.effort import Sample
from zrpc.bench.row import Row

__all__ = ["Failure", "RowResult", "Spread"]


@dataclass(frozen=True)
class Failure:
    """A row that could not be measured in one round.

    Attributes:
        reason: why, in a line.
        final: whether it is of no use to try again.
    """

    reason: str
    final: bool = False


@dataclass(frozen=True)
class Spread:
    """A number over several rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """The spread of some values; None where there is none."""
        found = list(values)
        return cls(statistics.median(found), min(found), max(found)) if found else None


@dataclass
class RowResult:
    """One row's outcomes.

    Attributes:
        row: the row.
        outcomes: for each participant, what came out, round by round.
    """

    row: Row
    outcomes: dict[str, list[Sample | Failure]] = field(default_factory=dict)

    def add(self, participant: str, outcome: Sample | Failure) -> None:
        """Enters the outcome of the next round."""
        self.outcomes.setdefault(participant, []).append(outcome)

    def spread(self, participant: str) -> Spread | None:
        """A participant's values over the rounds that it got through; None where none."""
        return Spread.of(value for value in self._values(participant) if value is not None)

    def failures(self, participant: str) -> list[Failure]:
        """Where a participant did not get through."""
        return [each for each in self.outcomes.get(participant, []) if isinstance(each, Failure)]

    def failed_for_good(self, participant: str) -> Failure | None:
        """The failure after which there is nothing to try; None where there was none."""
        return next((each for each in self.failures(participant) if each.final), None)

    def times_faster(self, other: str, than: str = "zrpc") -> Spread | None:
        """How many times as fast ``than`` is as ``other``, within each round.

        Where a row asks for it, both are compared by what they have above the limit's median.
        Rounds in which one of them failed, or has nothing above the limit, don't count.
        """
        base = 0.0
        if self.row.above_limit:
            limit = self.spread("limit")
            if limit is None:
                return None
            base = limit.median
        pairs = _whole_pairs(self._values(other), self._values(than))
        above = [(first - base, second - base) for first, second in pairs]
        good = [(first, second) for first, second in above if first > 0 and second > 0]
        if self.row.unit.more_is_better:
            return Spread.of(second / first for first, second in good)
        return Spread.of(first / second for first, second in good)

    def _values(self, participant: str) -> list[float | None]:
        outcomes = self.outcomes.get(participant, [])
        return [each.value if isinstance(each, Sample) else None for each in outcomes]


def _whole_pairs(
    first: Sequence[float | None], second: Sequence[float | None]
) -> list[tuple[float, float]]:
    # The last round may be cut off between the two.
    pairs = zip(first, second, strict=False)
    return [(a, b) for a, b in pairs if a is not None and b is not None]

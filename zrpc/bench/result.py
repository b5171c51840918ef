"""The results of a run: by row, by participant, by round."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

from zrpc.bench.row import Row
from zrpc.bench.session import Sample


@dataclass(frozen=True)
class Failure:
    """A row that could not be measured in one round.

    Attributes:
        reason: why, in one line.
        final: whether trying again would be useless.
    """

    reason: str
    final: bool = False


@dataclass(frozen=True)
class Spread:
    """The median, minimum and maximum of a number over several rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """Returns the spread of the values, or None if there are none."""
        found = list(values)
        return cls(statistics.median(found), min(found), max(found)) if found else None


@dataclass
class RowResult:
    """The outcomes of one row.

    Attributes:
        row: the row.
        outcomes: each participant's outcomes, in the order of the rounds.
    """

    row: Row
    outcomes: dict[str, list[Sample | Failure]] = field(default_factory=dict)

    def add(self, participant: str, outcome: Sample | Failure) -> None:
        """Adds the outcome of the next round."""
        self.outcomes.setdefault(participant, []).append(outcome)

    def spread(self, participant: str) -> Spread | None:
        """Returns the spread over the rounds in which a participant succeeded, or None."""
        return Spread.of(each.value for each in self._samples(participant))

    def more(self, participant: str) -> dict[str, float]:
        """Returns the other counts of a participant's last success."""
        return next((each.more for each in self._samples(participant)[::-1]), {})

    def failures(self, participant: str) -> list[Failure]:
        """Returns the failures of a participant."""
        return [each for each in self.outcomes.get(participant, []) if isinstance(each, Failure)]

    def final_failure(self, participant: str) -> Failure | None:
        """Returns a participant's final failure, or None if it has had none."""
        return next((each for each in self.failures(participant) if each.final), None)

    def times_faster(self, other: str, than: str = "zrpc") -> Spread | None:
        """Returns how many times faster ``than`` is than ``other``, computed within each round.

        If the row says so, the limit's median is first subtracted from both values. Rounds in
        which either failed, or is not above the limit, don't count.
        """
        base = 0.0
        if self.row.above_limit:
            limit = self.spread("limit")
            if limit is None:
                return None
            base = limit.median
        # An interrupted run may have measured only one of the two in its last round.
        pairs = zip(self._values(other), self._values(than), strict=False)
        above = [(one - base, two - base) for one, two in pairs]
        good = [(first, second) for first, second in above if first > 0 and second > 0]
        if self.row.unit.more_is_better:
            return Spread.of(second / first for first, second in good)
        return Spread.of(first / second for first, second in good)

    def _samples(self, participant: str) -> list[Sample]:
        return [each for each in self.outcomes.get(participant, []) if isinstance(each, Sample)]

    def _values(self, participant: str) -> list[float]:
        """Returns the value of each round; not a number if it failed."""
        outcomes = self.outcomes.get(participant, [])
        return [each.value if isinstance(each, Sample) else math.nan for each in outcomes]

"""A run of the benchmark: rounds, in each round all groups, in each group all participants.

How fast one mesh is changes within seconds by a factor of two or three: with where the system
happens to run its threads, and with what else runs. So the meshes of a round stand side by side,
and are measured in short turns, A B A B, so that they meet the same moods of the machine; between
its turns a mesh is paused, so that it takes no processor from another; and each round has fresh
ones.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

from zrpc.bench.effort import Sample
from zrpc.bench.mesh import HungError, MeshError
from zrpc.bench.result import Failure, RowResult
from zrpc.bench.row import Group, Row
from zrpc.bench.seat import Seat
from zrpc.bench.settings import Settings
from zrpc.launch import LaunchError, Starter, make_starter
from zrpc.launch.starter import DEFAULT_PRELOAD

__all__ = ["Run", "Watcher", "warm_starter"]

_PRELOAD = (
    *DEFAULT_PRELOAD,
    "torch.distributed.rpc",
    "torch.distributed.autograd",
    "zrpc.autograd",
    "zrpc.bench.calls",
    "zrpc.bench.limits",
    "zrpc.bench.member",
    "zrpc.bench.raw",
    "zrpc.bench.references",
    "zrpc.bench.tensors",
)


class Watcher(Protocol):
    """Is told how far a run is."""

    def measures(self, number: int, group: Group, row: Row) -> None:
        """A row is measured now, in the round of that number."""

    def measured(self) -> None:
        """It is done."""


@dataclass
class Run:
    """A run, and what it has found so far.

    Attributes:
        groups: what to measure.
        settings: how.
        results: by row, in the order of the groups; complete also where the run was cut off.
        notes: what else went wrong.
    """

    groups: Sequence[Group]
    settings: Settings
    results: list[RowResult] = field(init=False)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.results = [RowResult(row) for group in self.groups for row in group.rows]
        self._of = {result.row.name: result for result in self.results}

    def run(self, watcher: Watcher) -> None:
        """Measures everything.

        Raises:
            LaunchError: processes can't be started at all.
        """
        with ExitStack() as stack:
            warm = stack.enter_context(warm_starter())
            fresh = warm
            if any(group.fresh for group in self.groups):
                fresh = stack.enter_context(make_starter("spawn", env=_environment()))
            for number in range(1, self.settings.rounds + 1):
                for group in self.groups:
                    self._measure(number, group, fresh if group.fresh else warm, watcher)

    def _measure(self, number: int, group: Group, starter: Starter, watcher: Watcher) -> None:
        """One group, in fresh meshes that stand side by side and have their turns."""
        with ExitStack() as stack:
            seats = [
                stack.enter_context(Seat(group, participant, starter, self.settings))
                for participant in self.settings.participants
            ]
            for row in group.rows:
                watcher.measures(number, group, row)
                self._measure_row(row, group.turns, seats)
                watcher.measured()
        for seat in seats:
            self.notes += [f"round {number}, {group.name}: {each}" for each in seat.complaints]

    def _measure_row(self, row: Row, turns: int, seats: Sequence[Seat]) -> None:
        result = self._of[row.name]
        effort = self.settings.effort.divided(turns)
        samples: dict[str, list[Sample]] = {}
        failures: dict[str, Failure] = {}
        for seat in seats:
            # What hung once would hang again, for as long.
            if (failure := result.failed_for_good(seat.participant)) is not None:
                failures[seat.participant] = failure
        for _ in range(turns):
            for seat in seats:
                if seat.participant not in failures and seat.measures(row):
                    try:
                        sample = seat.measure(row, effort)
                    except (MeshError, LaunchError) as error:
                        failure = Failure(str(error), isinstance(error, HungError))
                        failures[seat.participant] = failure
                    else:
                        samples.setdefault(seat.participant, []).append(sample)
        for participant, found in samples.items():
            if participant not in failures:
                result.add(participant, Sample.merged(found, row.unit.more_is_better))
        for participant, failure in failures.items():
            result.add(participant, failure)


def warm_starter() -> Starter:
    """What forks processes that have imported all that is measured; enter it to start it."""
    return make_starter(preload=_PRELOAD, env=_environment())


def _environment() -> dict[str, str]:
    # As launchers set it. It is read when torch is loaded.
    return {"OMP_NUM_THREADS": "1", **os.environ}

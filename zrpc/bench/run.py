"""A run of the benchmark: rounds; in each round all groups; in each group all participants.

The speed of one mesh changes within seconds by a factor of two or three. It depends on where the
system happens to run its threads, and on what else is running. So the meshes of a round exist at
the same time and are measured in short turns, A B A B, under the same conditions. Between its turns
a mesh is paused, so that it takes no processor time from another. Each round has fresh meshes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from zrpc.bench.mesh import HungError, MeshError
from zrpc.bench.participant import Participant
from zrpc.bench.result import Failure, RowResult
from zrpc.bench.row import Group, Row
from zrpc.bench.rows import WORKLOAD_MODULES
from zrpc.bench.sampling import Sample, Settings
from zrpc.launch import LaunchError, Starter
from zrpc.launch.starter import DEFAULT_PRELOAD

__all__ = ["Run", "warm_starter"]

_PRELOAD = (
    *DEFAULT_PRELOAD,
    "torch.distributed.rpc",
    "torch.distributed.autograd",
    "zrpc.autograd",
    "zrpc.bench.worker",
    "zrpc.bench.raw_zmq",
    *sorted(WORKLOAD_MODULES),
)


@dataclass
class Run:
    """A run and its results so far.

    Attributes:
        groups: the rows to measure.
        settings: how to measure them.
        results: one for each row, in the order of the groups; also after an interrupted run.
        notes: errors that do not belong to a row.
    """

    groups: Sequence[Group]
    settings: Settings
    results: list[RowResult] = field(init=False)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.results = [RowResult(row) for group in self.groups for row in group.rows]
        self._result_of_row = {result.row.name: result for result in self.results}

    def run(self, show: Callable[[int, Group, Row], None]) -> None:
        """Measures all rows in all rounds.

        Args:
            show: called with the number of the round as each row begins.

        Raises:
            LaunchError: no process can be started.
        """
        with ExitStack() as stack:
            warm = stack.enter_context(warm_starter())
            fresh = warm
            if any(group.fresh for group in self.groups):
                fresh = stack.enter_context(Starter("spawn", env=_environment()))
            for number in range(1, self.settings.rounds + 1):
                for group in self.groups:
                    starter = fresh if group.fresh else warm
                    self._measure(number, group, starter, partial(show, number, group))

    def _measure(
        self, number: int, group: Group, starter: Starter, show: Callable[[Row], None]
    ) -> None:
        """Measures one group, in fresh meshes that exist at the same time and take turns."""
        with ExitStack() as stack:
            participants = [
                stack.enter_context(Participant(group, name, starter, self.settings))
                for name in self.settings.participant_names
            ]
            for row in group.rows:
                show(row)
                self._measure_row(row, group.turns, participants)
        for participant in participants:
            self.notes += [
                f"round {number}, {group.name}: {error}" for error in participant.shutdown_errors
            ]

    def _measure_row(self, row: Row, turns: int, participants: Sequence[Participant]) -> None:
        result = self._result_of_row[row.name]
        sampling = self.settings.sampling.divided(turns)
        samples: dict[str, list[Sample]] = {}
        failures: dict[str, Failure] = {}
        for participant in participants:
            # A workload that hung once would hang again until the deadline.
            if (failure := result.final_failure(participant.name)) is not None:
                failures[participant.name] = failure
        for _ in range(turns):
            for participant in participants:
                name = participant.name
                if name not in failures and participant.can_measure(row):
                    try:
                        sample = participant.measure(row, sampling)
                    except (MeshError, LaunchError) as error:
                        failures[name] = Failure(str(error), isinstance(error, HungError))
                    else:
                        samples.setdefault(name, []).append(sample)
        for name, found in samples.items():
            if name not in failures:
                result.add(name, Sample.merged(found, row.unit.more_is_better))
        for name, failure in failures.items():
            result.add(name, failure)


def warm_starter() -> Starter:
    """Returns a starter whose processes have already imported both libraries."""
    return Starter(preload=_PRELOAD, env=_environment())


def _environment() -> dict[str, str]:
    # Launchers set this too. torch reads it when it is loaded.
    return {"OMP_NUM_THREADS": "1", **os.environ}

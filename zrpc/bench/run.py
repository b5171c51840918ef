"""A run of the benchmark: rounds, in each round all groups, in each group all participants."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

from zrpc.bench.effort import Effort, Sample
from zrpc.bench.mesh import HungError, Mesh, MeshError
from zrpc.bench.result import Failure, RowResult
from zrpc.bench.row import Group, Limit, Row
from zrpc.launch import LaunchError, Starter, make_starter
from zrpc.launch.starter import DEFAULT_PRELOAD

__all__ = ["LIMIT", "Run", "Settings", "Watcher", "warm_starter"]

LIMIT = "limit"
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


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        against: the other library, or None.
        rounds: how many rounds.
        tcp: whether only tcp is to be used.
        effort: how much to measure of each row in each round.
        deadline: seconds that a row may take in one round.
        patience: seconds that a mesh may take to start, and to end.
    """

    against: str | None = "torch"
    rounds: int = 5
    tcp: bool = False
    effort: Effort = field(default_factory=Effort)
    deadline: float = 60.0
    patience: float = 60.0

    @property
    def participants(self) -> tuple[str, ...]:
        """Whose meshes start in each round, in their order."""
        return (*([self.against] if self.against else []), "zrpc", LIMIT)


class Watcher(Protocol):
    """Is told how far a run is."""

    def measures(self, number: int, group: Group, participant: str, row: Row) -> None:
        """A row is measured now, in the round of that number."""

    def measured(self) -> None:
        """It is done, or was left out."""


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
                    starter = fresh if group.fresh else warm
                    for participant in self.settings.participants:
                        self._measure(number, group, participant, starter, watcher)

    def _measure(
        self, number: int, group: Group, participant: str, starter: Starter, watcher: Watcher
    ) -> None:
        """One group, in as many fresh meshes of a participant as it takes: one if all is well."""
        left = self._to_do(group, participant, watcher)
        while left:
            row: Row | None = None
            mesh = self._mesh(group, participant, starter)
            try:
                with mesh:
                    while left:
                        row = left.popleft()
                        watcher.measures(number, group, participant, row)
                        self._enter(row, participant, self._sample(mesh, participant, row), watcher)
                        row = None
                self.notes += [f"round {number}, {group.name}: {each}" for each in mesh.complaints]
            except (MeshError, LaunchError) as error:
                hung = isinstance(error, HungError)
                if row is not None:  # the others get a mesh of their own
                    self._enter(row, participant, Failure(str(error), hung), watcher)
                    continue
                while left:
                    self._enter(left.popleft(), participant, Failure(str(error), hung), watcher)

    def _to_do(self, group: Group, participant: str, watcher: Watcher) -> deque[Row]:
        rows: deque[Row] = deque()
        for row in group.rows:
            if participant == LIMIT and row.limit is None:
                watcher.measured()
            elif (failure := self._of[row.name].failed_for_good(participant)) is not None:
                self._enter(row, participant, failure, watcher)
            else:
                rows.append(row)
        return rows

    def _mesh(self, group: Group, participant: str, starter: Starter) -> Mesh:
        limit = participant == LIMIT
        return Mesh(
            starter,
            participant,
            2 if limit else group.workers,
            # A process that has imported torch and nothing else has no sockets either.
            joined=group.joined and not (limit and group.fresh),
            tcp=self.settings.tcp,
            patience=self.settings.patience,
        )

    def _sample(self, mesh: Mesh, participant: str, row: Row) -> Sample:
        measured: Row | Limit = row
        if participant == LIMIT:
            limit = row.limit_of(self.settings.tcp)
            assert limit is not None  # such rows were sorted out
            measured = limit
        return mesh.measure(
            measured.workload,
            measured.arguments,
            self.settings.effort,
            row.deadline or self.settings.deadline,
        )

    def _enter(
        self, row: Row, participant: str, outcome: Sample | Failure, watcher: Watcher
    ) -> None:
        self._of[row.name].add(participant, outcome)
        watcher.measured()


def warm_starter() -> Starter:
    """What forks processes that have imported all that is measured; enter it to start it."""
    return make_starter(preload=_PRELOAD, env=_environment())


def _environment() -> dict[str, str]:
    # As launchers set it. It is read when torch is loaded.
    return {"OMP_NUM_THREADS": "1", **os.environ}

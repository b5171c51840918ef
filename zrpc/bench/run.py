"""A run of the benchmark: rounds; in each round all groups; in each group all participants.

The speed of one mesh changes within seconds by a factor of two or three. It depends on where the
system happens to run its threads, and on what else is running. So the meshes of a round exist at
the same time and are measured in short turns, A B A B, under the same conditions. Between its turns
a mesh is paused, so that it takes no processor time from another. Each round has fresh meshes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Self

from zrpc.bench.mesh import HungError, Mesh, MeshError, environment
from zrpc.bench.result import Failure, RowResult
from zrpc.bench.row import Group, Limit, Row
from zrpc.bench.rows import WORKLOAD_MODULES
from zrpc.bench.session import LIMIT, Sample, Sampling
from zrpc.launch import LaunchError, Starter
from zrpc.launch.starter import DEFAULT_PRELOAD

_PRELOAD = (
    *DEFAULT_PRELOAD,
    "torch.distributed.rpc",
    "torch.distributed.autograd",
    "zrpc.autograd",
    "zrpc.bench.worker",
    "zrpc.bench.raw_zmq",
    *sorted(WORKLOAD_MODULES),
)


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        against: the library to compare with, or None.
        rounds: the number of rounds.
        tcp: whether to use only tcp.
        device: the device that tensors are on; empty for the CPU.
        sampling: how long and how often to repeat each row in each round.
        deadline: the seconds that a row may take in one round.
        mesh_timeout: the seconds that a mesh may take to start, and to shut down.
    """

    against: str | None = "torch"
    rounds: int = 5
    tcp: bool = False
    device: str = ""
    sampling: Sampling = field(default_factory=Sampling)
    deadline: float = 60.0
    mesh_timeout: float = 60.0

    @property
    def participant_names(self) -> tuple[str, ...]:
        """The participants of each round, in the order in which they are measured."""
        return (*([self.against] if self.against else []), "zrpc", LIMIT)


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
                fresh = stack.enter_context(Starter("spawn", env=environment()))
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
        able = [each for each in participants if each.can_measure(row)]
        samples: dict[str, list[Sample]] = {each.name: [] for each in able}
        # A workload that hung once would hang again until the deadline.
        failures = {each.name: result.final_failure(each.name) for each in able}
        for participant in able * turns:
            name = participant.name
            if failures[name] is None:
                try:
                    samples[name].append(participant.measure(row, sampling))
                except (MeshError, LaunchError) as error:
                    failures[name] = Failure(str(error), isinstance(error, HungError))
        for name, found in samples.items():
            result.add(name, failures[name] or Sample.merged(found, row.unit.more_is_better))


class Participant:
    """A library, or the limit, in one round of one group. A context manager.

    The mesh starts with the first measured row, so a participant with nothing to measure has none.
    Between turns it is paused.

    Attributes:
        name: a library's name, or ``limit``.
        shutdown_errors: errors in the shutdown of its meshes.
    """

    def __init__(self, group: Group, name: str, starter: Starter, settings: Settings) -> None:
        self.name = name
        self.shutdown_errors: list[str] = []
        self._group = group
        self._starter = starter
        self._settings = settings
        self._mesh: Mesh | None = None
        self._start_failed: MeshError | None = None

    def can_measure(self, row: Row) -> bool:
        """Returns whether there is a workload for this row."""
        return self._row_or_limit(row) is not None

    def measure(self, row: Row, sampling: Sampling) -> Sample:
        """Measures a row.

        Raises:
            MeshError: it failed; the next row is measured in a new mesh.
            LaunchError: no process could be started.
        """
        measured = self._row_or_limit(row)
        assert measured is not None
        mesh = self._started_mesh()
        deadline = row.deadline or self._settings.deadline
        mesh.resume()
        try:
            sample = mesh.measure(measured.workload, measured.arguments, sampling, deadline)
        except MeshError as error:
            self._mesh = None
            mesh.__exit__(type(error), error, None)
            raise
        mesh.pause()
        return sample

    def _row_or_limit(self, row: Row) -> Row | Limit | None:
        if self.name == LIMIT:
            return row.limit_of(self._settings.tcp, self._settings.device)
        return row if row.measured_by(self.name) else None

    def _started_mesh(self) -> Mesh:
        if self._start_failed is not None:  # it would fail again, after as long a wait
            raise self._start_failed
        if self._mesh is None:
            group, limit = self._group, self.name == LIMIT
            mesh = Mesh(
                self._starter,
                self.name,
                2 if limit else group.workers,
                # The limit of a fresh group is a process that has only imported torch.
                forms_mesh=group.forms_mesh and not (limit and group.fresh),
                tcp=self._settings.tcp,
                device=self._settings.device,
                timeout=self._settings.mesh_timeout,
            )
            try:
                mesh.__enter__()
            except MeshError as error:
                self._start_failed = type(error)(f"at the start: {error}")
                raise self._start_failed from error
            self._mesh = mesh
        return self._mesh

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        mesh, self._mesh = self._mesh, None
        if mesh is not None:
            mesh.__exit__(kind, error, trace)
            self.shutdown_errors += mesh.shutdown_errors


def warm_starter() -> Starter:
    """Returns a starter whose processes have already imported both libraries."""
    return Starter(preload=_PRELOAD, env=environment())

"""A participant's place in a group: a mesh, and a new one after each failure."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from zrpc.bench.effort import Effort, Sample
from zrpc.bench.mesh import Mesh, MeshError
from zrpc.bench.row import Group, Limit, Row
from zrpc.bench.settings import LIMIT, Settings
from zrpc.launch import LaunchError, Starter

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Seat"]


class Seat:
    """Where one participant is measured, in one round of one group. A context manager.

    The mesh starts with the first row that is measured, so that there is none where there is
    nothing to measure. Between its turns it is paused.

    Attributes:
        participant: a library's name, or ``limit``.
        complaints: what went wrong at the end of meshes.
    """

    def __init__(
        self, group: Group, participant: str, starter: Starter, settings: Settings
    ) -> None:
        self.participant = participant
        self.complaints: list[str] = []
        self._group = group
        self._starter = starter
        self._settings = settings
        self._mesh: Mesh | None = None
        self._start_failed: MeshError | LaunchError | None = None

    def measures(self, row: Row) -> bool:
        """Whether there is something to measure here."""
        return self._job(row) is not None

    def measure(self, row: Row, effort: Effort) -> Sample:
        """Measures a row.

        Raises:
            MeshError: it failed; the next one is measured in a new mesh.
            LaunchError: no process could be started.
        """
        job = self._job(row)
        assert job is not None
        mesh = self._started()
        deadline = row.deadline or self._settings.deadline
        mesh.resume()
        try:
            sample = mesh.measure(job.workload, job.arguments, effort, deadline)
        except MeshError as error:
            self._mesh = None
            mesh.__exit__(type(error), error, None)
            raise
        mesh.pause()
        return sample

    def _job(self, row: Row) -> Row | Limit | None:
        return row.limit_of(self._settings.tcp) if self.participant == LIMIT else row

    def _started(self) -> Mesh:
        if self._start_failed is not None:  # it would take as long again
            raise self._start_failed
        if self._mesh is None:
            mesh = self._new_mesh()
            try:
                mesh.__enter__()
            except MeshError as error:
                self._start_failed = type(error)(f"at the start: {error}")
                raise self._start_failed from error
            self._mesh = mesh
        return self._mesh

    def _new_mesh(self) -> Mesh:
        group, limit = self._group, self.participant == LIMIT
        return Mesh(
            self._starter,
            self.participant,
            2 if limit else group.workers,
            # A process that has imported torch and nothing else has no sockets either.
            joined=group.joined and not (limit and group.fresh),
            tcp=self._settings.tcp,
            patience=self._settings.patience,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        mesh, self._mesh = self._mesh, None
        if mesh is not None:
            mesh.__exit__(kind, error, trace)
            self.complaints += mesh.complaints

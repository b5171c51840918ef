"""A participant in a group: a mesh, and a new one after each failure."""

from __future__ import annotations

from typing import Self

from zrpc.bench.mesh import Mesh, MeshError
from zrpc.bench.row import Group, Limit, Row
from zrpc.bench.sampling import LIMIT, Sample, Sampling, Settings
from zrpc.launch import LaunchError, Starter

__all__ = ["Participant"]


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
        self._start_failed: MeshError | LaunchError | None = None

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

"""The types that describe a row of the benchmark."""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass, field

from zrpc.bench.library import LIBRARIES


class Unit(enum.Enum):
    """The unit of a row's numbers."""

    SECONDS = "s"
    RATE = "1/s"
    BYTES = "B"
    COUNT = "1"

    @property
    def more_is_better(self) -> bool:
        """Whether a larger number is better."""
        return self is Unit.RATE


@dataclass(frozen=True)
class Limit:
    """A bound on how fast a row can be, measured beside it.

    Attributes:
        name: its name in the table.
        workload: the function that measures it, as ``module:function`` of this package.
        arguments: the function's arguments after its session.
    """

    name: str
    workload: str
    arguments: tuple[float, ...] = ()


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        name: its name, which ``--rows`` matches.
        workload: the function that measures it, as ``module:function`` of this package.
        arguments: the function's arguments after its session.
        unit: the unit of the result.
        limit: the limit to show beside the libraries.
        tcp_limit: the limit over tcp; None if it is the same.
        device_limit: the limit if tensors are on a device; None if it can't be measured then.
        above_limit: whether the limit is subtracted before the libraries are compared.
        default: whether it is measured without ``--rows``.
        libraries: those that can measure it.
        bound: the most that zrpc should measure on a quiet machine, or the least of a rate.
        deadline: the seconds after which it has failed; None for the deadline of the run.
    """

    name: str
    workload: str
    arguments: tuple[float, ...] = ()
    unit: Unit = Unit.SECONDS
    limit: Limit | None = None
    tcp_limit: Limit | None = None
    device_limit: Limit | None = None
    above_limit: bool = False
    default: bool = True
    libraries: Collection[str] = LIBRARIES
    bound: float | None = None
    deadline: float | None = None

    def measured_by(self, library: str) -> bool:
        """Returns whether the library of that name can measure it."""
        return library in self.libraries

    def limit_of(self, tcp: bool, device: str = "") -> Limit | None:
        """Returns the limit for the transport in use and the device, if tensors are on one."""
        if device:
            return self.device_limit
        return self.tcp_limit if tcp and self.tcp_limit is not None else self.limit


@dataclass(frozen=True)
class Group:
    """Rows that are measured in the same mesh, one after another.

    Attributes:
        name: what the rows have in common.
        rows: the rows.
        workers: the number of workers in the mesh.
        fresh: whether its processes are new interpreters, not forks of a warm one.
        forms_mesh: whether its processes form a mesh at all.
        turns: the number of turns into which the measurement of each row is divided.
    """

    name: str
    rows: tuple[Row, ...] = field(repr=False)
    workers: int = 2
    fresh: bool = False
    forms_mesh: bool = True
    turns: int = 6

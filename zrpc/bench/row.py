"""What a row of the benchmark is."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

__all__ = ["Group", "Limit", "Row", "Unit"]


class Unit(enum.Enum):
    """What a row's numbers are."""

    SECONDS = "s"
    RATE = "1/s"
    BYTES = "B"

    @property
    def more_is_better(self) -> bool:
        """Whether the larger of two numbers is the better one."""
        return self is Unit.RATE


@dataclass(frozen=True)
class Limit:
    """What a row can't be faster than, measured beside it.

    Attributes:
        name: what it is, for the table.
        workload: what measures it, as ``module:function`` of this package.
        arguments: what the function is given after its session.
    """

    name: str
    workload: str
    arguments: tuple[float, ...] = ()


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: what it is called, and what ``--rows`` searches.
        workload: what measures it, as ``module:function`` of this package.
        arguments: what the function is given after its session.
        unit: what comes out.
        limit: what to compare with beside the other library.
        tcp_limit: the same for tcp; None for no difference.
        above_limit: whether the libraries are compared by what they have above the limit.
        default: whether it is measured when no rows are asked for.
        deadline: seconds after which it has failed; None for the run's.
    """

    name: str
    workload: str
    arguments: tuple[float, ...] = ()
    unit: Unit = Unit.SECONDS
    limit: Limit | None = None
    tcp_limit: Limit | None = None
    above_limit: bool = False
    default: bool = True
    deadline: float | None = None

    def limit_of(self, tcp: bool) -> Limit | None:
        """The limit for the transport in use."""
        return self.tcp_limit if tcp and self.tcp_limit is not None else self.limit


@dataclass(frozen=True)
class Group:
    """Rows that are measured in one mesh, one after another.

    Attributes:
        name: what they have in common.
        workers: how many the mesh has.
        fresh: whether its processes are new interpreters, not forks of a warm one.
        joined: whether its processes form a mesh at all.
        turns: in how many turns each row is measured.
        rows: the rows.
    """

    name: str
    rows: tuple[Row, ...] = field(repr=False)
    workers: int = 2
    fresh: bool = False
    joined: bool = True
    turns: int = 6

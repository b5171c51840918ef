"""The settings of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from zrpc.bench.sampling import Sampling

__all__ = ["LIMIT", "Settings"]

# The participant that is not a library.
LIMIT = "limit"


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        against: the library to compare with, or None.
        rounds: the number of rounds.
        tcp: whether to use only tcp.
        sampling: how long and how often to repeat each row in each round.
        deadline: the seconds that a row may take in one round.
        mesh_timeout: the seconds that a mesh may take to start, and to shut down.
    """

    against: str | None = "torch"
    rounds: int = 5
    tcp: bool = False
    sampling: Sampling = field(default_factory=Sampling)
    deadline: float = 60.0
    mesh_timeout: float = 60.0

    @property
    def participant_names(self) -> tuple[str, ...]:
        """The participants of each round, in the order in which they are measured."""
        return (*([self.against] if self.against else []), "zrpc", LIMIT)

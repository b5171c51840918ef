"""How a run measures."""

from __future__ import annotations

from dataclasses import dataclass, field

from zrpc.bench.effort import Effort

__all__ = ["LIMIT", "Settings"]

# The participant that is no library.
LIMIT = "limit"


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

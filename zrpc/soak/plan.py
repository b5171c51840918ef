"""What a soak test will do, as far as that can be known ahead: all of it from the seed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Death", "Life", "Pause", "plan"]

# Seconds of a shift; of the one with a death, and of the one after it.
_SHIFT = 3.0
# How many shifts there are before the first death, and how many deaths. Short lives have more
# starts and ends, long ones show what grows.
_HEALTHY = (2, 2, 4, 20)
_DEATHS = (1, 2, 2, 4)
_LANES = 2

# The ways that messages can go, in turn.
_WAYS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("shared memory", {}),
    ("frames", {"shared_memory": 0}),
    ("tcp", {"transport": "tcp", "shared_memory": 0}),
)


@dataclass(frozen=True)
class Pause:
    """A worker's process is stopped for a while.

    Attributes:
        rank: whose.
        after: seconds from the beginning of the shift.
        seconds: for how long; less than the heartbeat limit.
    """

    rank: int
    after: float
    seconds: float


@dataclass(frozen=True)
class Death:
    """A worker is killed.

    Attributes:
        rank: whose.
        after: seconds from the beginning of the shift.
    """

    rank: int
    after: float


@dataclass(frozen=True)
class Life:
    """The life of one mesh.

    Attributes:
        name: unique in the run; with the run's seed, the beginning of all its random seeds.
        way: how messages go.
        options: for `zrpc.ZmqRpcBackendOptions`.
        elastic: whether the mesh is an elastic one.
        healthy: how many shifts there are before the one with the first death.
        seconds: of a shift.
        lanes: how many threads act at once on each worker.
        deaths: who is killed, one after the other; all but the last are started again.
        pauses: for each healthy shift, who is stopped for a while, if any.
    """

    name: str
    way: str
    options: Mapping[str, Any]
    elastic: bool
    healthy: int
    seconds: float
    lanes: int
    deaths: tuple[Death, ...]
    pauses: tuple[Pause | None, ...]

    @property
    def length(self) -> float:
        """The seconds of all its shifts."""
        return self.seconds * (self.healthy + 4 * len(self.deaths) - 2)


def plan(seed: int, number: int, workers: int, left: float) -> Life:
    """The life of that number in a run.

    Args:
        seed: the run's.
        number: from 0.
        workers: how many there are.
        left: seconds until the run's end; the life is not planned to be longer, if it can.
    """
    rng = random.Random(f"{seed}.{number}")
    way, options = _WAYS[number % len(_WAYS)]
    healthy = min(rng.choice(_HEALTHY), max(1, int(left / _SHIFT) - 3))
    pauses = [
        Pause(rng.randrange(workers), rng.random() * _SHIFT / 2, 0.2 + rng.random())
        if rng.random() < 0.5
        else None
        for _ in range(max(_HEALTHY))
    ]
    return Life(
        name=f"{seed}.{number}",
        way=way,
        options=options,
        elastic=rng.random() < 0.5,
        healthy=healthy,
        seconds=_SHIFT,
        lanes=_LANES,
        deaths=tuple(
            Death(rng.randrange(workers), _SHIFT * (0.2 + 0.5 * rng.random()))
            for _ in range(min(rng.choice(_DEATHS), max(1, int(left / _SHIFT / 4))))
        ),
        pauses=tuple(pauses[:healthy]),
    )

"""The schedule of a soak test. It is determined by the seed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# The duration of each phase.
_PHASE_SECONDS = 3.0
# The possible numbers of phases before the first death, and of deaths. Short episodes have more
# starts and ends; long ones show growth.
_HEALTHY_PHASES = (2, 2, 4, 20)
_DEATH_COUNTS = (1, 2, 2, 4)
_CLIENTS = 2

# The transports of successive episodes.
_TRANSPORTS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("shared memory", {}),
    ("frames", {"shared_memory": 0}),
    ("tcp", {"transport": "tcp", "shared_memory": 0}),
)


@dataclass(frozen=True)
class Pause:
    """A worker's process is stopped for a while.

    Attributes:
        rank: the worker's rank.
        after: seconds from the start of the phase.
        seconds: the duration of the pause, less than the heartbeat timeout.
    """

    rank: int
    after: float
    seconds: float


@dataclass(frozen=True)
class Death:
    """A worker is killed.

    Attributes:
        rank: the worker's rank.
        after: seconds from the start of the phase.
    """

    rank: int
    after: float


@dataclass(frozen=True)
class Episode:
    """What one mesh does, from its start to its end.

    Attributes:
        name: unique in the run; the prefix of all its random seeds.
        transport: a name for how messages travel.
        options: arguments of `zrpc.ZmqRpcBackendOptions`.
        elastic: whether the mesh is elastic.
        healthy: the number of phases before the one with the first death.
        seconds: the duration of a phase.
        clients: the number of client threads on each worker.
        deaths: the workers that are killed, in order; all but the last are restarted.
        pauses: for each healthy phase, the pause of a worker, if there is one.
    """

    name: str
    transport: str
    options: Mapping[str, Any]
    elastic: bool
    healthy: int
    seconds: float
    clients: int
    deaths: tuple[Death, ...]
    pauses: tuple[Pause | None, ...]

    @property
    def length(self) -> float:
        """The duration of all its phases, in seconds."""
        return self.seconds * (self.healthy + 4 * len(self.deaths) - 2)


def schedule_episode(seed: int, number: int, workers: int, seconds_left: float) -> Episode:
    """Schedules one episode of a run.

    Args:
        seed: the seed of the run.
        number: the number of the episode, from 0.
        workers: the number of workers.
        seconds_left: seconds until the end of the run. The episode is not longer, unless even the
            shortest would be.
    """
    rng = random.Random(f"{seed}.{number}")
    transport, options = _TRANSPORTS[number % len(_TRANSPORTS)]
    phases_left = int(seconds_left / _PHASE_SECONDS)
    healthy = min(rng.choice(_HEALTHY_PHASES), max(1, phases_left - 3))
    pauses = [
        Pause(rng.randrange(workers), rng.random() * _PHASE_SECONDS / 2, 0.2 + rng.random())
        if rng.random() < 0.5
        else None
        for _ in range(max(_HEALTHY_PHASES))
    ]
    elastic = rng.random() < 0.5
    deaths = [
        Death(rng.randrange(workers), _PHASE_SECONDS * (0.2 + 0.5 * rng.random()))
        for _ in range(min(rng.choice(_DEATH_COUNTS), max(1, phases_left // 4)))
    ]
    return Episode(
        name=f"{seed}.{number}",
        transport=transport,
        options=options,
        elastic=elastic,
        healthy=healthy,
        seconds=_PHASE_SECONDS,
        clients=_CLIENTS,
        deaths=tuple(deaths),
        pauses=tuple(pauses[:healthy]),
    )

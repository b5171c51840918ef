"""What happens in a round: drawn from a seed, without I/O."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["FAULTS", "HEARTBEAT_SECONDS", "Plan", "draw"]

HEARTBEAT_SECONDS = 3.0
# For how long a worker is stopped. In between, some may lose it and others not: then anyone of
# such a pair may be put out.
_SHORT_SECONDS = (0.1, 1.2)
_MIDDLE_SECONDS = (1.2, 1.5 * HEARTBEAT_SECONDS)
_INTERRUPTS_SECONDS = (0.0, 2.0)
_LONG_SECONDS = (1.5 * HEARTBEAT_SECONDS, 8.0)
# The rest of the work, so that all that the fault has broken can show.
_AFTER_SECONDS = 1.5
FAULTS = (
    "killed",
    "stopped, short",
    "stopped, middle",
    "stopped, long",
    "interrupted, stays",
    "interrupted, leaves",
)
_TRANSPORTS: Mapping[str, Mapping[str, Any]] = {
    "shared memory": {},
    "sockets": {"shared_memory": 0},
    "tcp": {"transport": "tcp", "shared_memory": 0},
}


@dataclass(frozen=True)
class Plan:
    """A round.

    Attributes:
        number: its number in the run; with the seed, the seed of the work.
        seed: the seed of the run.
        workers: how many there are.
        transport: how messages travel.
        fault: one of `FAULTS`.
        victim: the rank of the worker that it happens to.
        after: seconds from the beginning of the work to the fault.
        seconds: how long the worker is stopped, or interrupted again and again; else 0.
    """

    number: int
    seed: int
    workers: int
    transport: str
    fault: str
    victim: int
    after: float
    seconds: float

    def __str__(self) -> str:
        time = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.transport}: {self.victim} of {self.workers} {self.fault}{time}"

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `zrpc.ZmqRpcBackendOptions`."""
        return {"heartbeat_timeout": HEARTBEAT_SECONDS, **_TRANSPORTS[self.transport]}

    @property
    def work_seconds(self) -> float:
        """How long the workers work."""
        return self.after + self.seconds + _AFTER_SECONDS

    def suspects(self, rank: int) -> set[int]:
        """Returns the ranks whose loss explains errors on a worker."""
        if self.fault in ("stopped, short", "interrupted, stays"):
            return set()
        stopped = self.fault == "stopped, long" and rank == self.victim
        if self.fault == "stopped, middle" or stopped:
            return set(range(self.workers))
        return {self.victim}

    @property
    def survivors(self) -> list[int]:
        """The workers that still are in the mesh after the fault, or may be."""
        lost = self.fault in ("killed", "interrupted, leaves")
        return [rank for rank in range(self.workers) if not (lost and rank == self.victim)]


def draw(seed: int, number: int) -> Plan:
    """Returns the plan of a round. Each fault comes once in as many rounds as there are faults."""
    rng = random.Random(f"{seed}.{number}")
    order = random.Random(seed).sample(FAULTS, len(FAULTS))
    fault = order[number % len(order)]
    workers = rng.randint(4, 6)
    ranges = {
        "stopped, short": _SHORT_SECONDS,
        "stopped, middle": _MIDDLE_SECONDS,
        "stopped, long": _LONG_SECONDS,
        "interrupted, stays": _INTERRUPTS_SECONDS,
    }
    return Plan(
        number=number,
        seed=seed,
        workers=workers,
        transport=rng.choice([*_TRANSPORTS]),
        fault=fault,
        victim=rng.randrange(workers),
        after=rng.uniform(0.2, 1.5),
        seconds=rng.uniform(*ranges.get(fault, (0.0, 0.0))),
    )

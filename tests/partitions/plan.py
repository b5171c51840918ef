"""What happens in a round: drawn from a seed, without I/O."""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["FAULTS", "HEARTBEAT_SECONDS", "MOMENTS", "TRANSFER_BYTES", "Plan", "draw"]

HEARTBEAT_SECONDS = 3.0
# Faults that no worker may notice, and such that all must.
_SHORT_SECONDS = (0.1, 1.0)
_LONG_SECONDS = 2.5 * HEARTBEAT_SECONDS
TRANSFER_BYTES = 16_000_000
# How long a flapping link is cut each time, and how long it then is not.
_FLAP_SECONDS = ((0.2, 1.5), (0.1, 1.0))
MOMENTS = ("work", "init", "shutdown")
# What happens, and for how many seconds; None if it lasts.
FAULTS = (
    "cut, short",
    "cut, long",
    "flapping",
    "one way lost, short",
    "one way lost, long",
    "one way refused, long",
    "stopped, short",
    "stopped, long",
    "killed",
    "host vanishes",
)


@dataclass(frozen=True)
class Plan:
    """A round.

    Attributes:
        number: its number in the run.
        hosts: the host of each worker, by rank; those of the newcomers are the last.
        moment: when the fault begins: while the workers work, meet or leave.
        after: seconds from the beginning of that moment to the fault.
        fault: one of `FAULTS`.
        seconds: how long the fault lasts; None if it does not end.
        victim: a host, which is cut off or vanishes; or a worker, by its rank.
        other: the host from which nothing arrives at the victim, if one way is lost.
        transfer_bytes: the size of the largest tensors.
        flaps: of a flapping link, the seconds of each cut, and those after it.
        newcomers: how many workers join an elastic mesh, the first during the fault and the others
            after it; 0 if the mesh has a fixed size.
    """

    number: int
    hosts: tuple[int, ...]
    moment: str
    after: float
    fault: str
    seconds: float | None
    victim: int
    other: int
    transfer_bytes: int = TRANSFER_BYTES
    flaps: tuple[tuple[float, float], ...] = ()
    newcomers: int = 0

    def __str__(self) -> str:
        newcomers = f", {self.newcomers} of them join" if self.newcomers else ""
        return f"at {self.moment}: {self.fault}, {self.victim} of {self.hosts}{newcomers}"

    @property
    def names(self) -> list[str]:
        """The names of the workers."""
        return [f"w{rank}" for rank in range(len(self.hosts))]

    @property
    def founders(self) -> range:
        """The ranks of the workers that are there from the beginning."""
        return range(len(self.hosts) - self.newcomers)

    @property
    def may_be_noticed(self) -> bool:
        """Whether calls may fail."""
        return self.seconds is None or self.seconds > HEARTBEAT_SECONDS / 2

    @property
    def dead(self) -> list[int]:
        """The ranks of the workers that do not survive."""
        if self.fault == "killed":
            return [self.victim]
        return self.on_host(self.victim) if self.fault == "host vanishes" else []

    @property
    def store_vanishes(self) -> bool:
        """Whether the host of the store vanishes, without a word to its clients."""
        return self.fault == "host vanishes" and 0 in self.dead

    def may_be_out(self, rank: int) -> bool:
        """Whether others may put out a worker: it is of a pair that others still reach.

        A newcomer reaches both sides of a cut that is over.
        """
        if self.flaps or self.newcomers:
            return self.may_be_noticed
        pairs = self.fault.startswith("one way") and self.may_be_noticed
        return pairs and self.hosts[rank] in (self.victim, self.other)

    @property
    def separated_for_good(self) -> bool:
        """Whether workers that were apart are so to the end, though they reach each other again."""
        return (self.fault, self.moment, self.newcomers) == ("cut, long", "work", 0)

    def must_join(self, rank: int) -> bool:
        """Whether a newcomer reaches the store and all members that others reach."""
        if self.fault.startswith(("killed", "stopped")):
            return self.victim != 0
        during = rank == self.founders.stop
        lasting = self.fault in ("cut, long", "host vanishes")
        side = lasting and during and 0 != self.victim != self.hosts[rank]
        return side or not self.may_be_noticed

    def on_host(self, host: int) -> list[int]:
        """Returns the ranks of the workers of a host."""
        return [rank for rank, each in enumerate(self.hosts) if each == host]

    def apart(self, one: int, other: int) -> bool:
        """Returns whether the fault comes between two workers, by their ranks."""
        if not self.may_be_noticed:
            return False
        if self.fault.startswith(("stopped", "killed")):
            return self.victim in (one, other)
        hosts = {self.hosts[one], self.hosts[other]}
        if self.fault.startswith("one way"):
            return hosts == {self.victim, self.other}
        return self.victim in hosts and len(hosts) == 2


def draw(seed: int, number: int, transfer_bytes: int = TRANSFER_BYTES) -> Plan:
    """Returns the plan of a round. Each fault comes once in as many rounds as there are faults."""
    rng = random.Random(f"{seed}.{number}")
    order = random.Random(seed).sample(FAULTS, len(FAULTS))
    fault = order[number % len(order)]
    hosts = (0, 1, 2, rng.randrange(3))
    moment = rng.choices(MOMENTS, (4, 1, 1))[0]
    victim, other = rng.sample(range(3), 2)
    if fault.startswith(("stopped", "killed")):
        victim = rng.randrange(len(hosts))
    seconds = None
    flaps: tuple[tuple[float, float], ...] = ()
    if fault.endswith("short"):
        seconds = rng.uniform(*_SHORT_SECONDS)
    elif fault.endswith("long"):
        seconds = _LONG_SECONDS
    elif fault == "flapping":
        cut, whole = _FLAP_SECONDS
        times = range(rng.randint(3, 6))
        flaps = tuple((rng.uniform(*cut), rng.uniform(*whole)) for _ in times)
    after = rng.uniform(0.0, 1.5 if moment == "work" else 0.4)
    newcomers = 2 if moment == "work" and rng.random() < 0.4 else 0
    living = [host for host in range(3) if fault != "host vanishes" or host != victim]
    return Plan(
        number=number,
        hosts=(*hosts, *rng.choices(living, k=newcomers)),
        moment=moment,
        after=after,
        fault=fault,
        seconds=seconds,
        victim=victim,
        other=other,
        transfer_bytes=transfer_bytes,
        flaps=flaps,
        newcomers=newcomers,
    )

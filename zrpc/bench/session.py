"""What a workload is given: the workers, how often to repeat it, and what becomes of its times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# The participant that is not a library.
LIMIT = "limit"
# Workloads run on worker0 and call this worker.
PEER = "worker1"


@dataclass(frozen=True)
class Sample:
    """One row, measured in one mesh.

    Attributes:
        value: the median over the repeats, in seconds, per second, or bytes. For several turns,
            the median of their medians.
        worst: the worst repeat.
        repeats: the number of repeats.
        more: other counts of the same repeats, by name.
    """

    value: float
    worst: float
    repeats: int
    more: dict[str, float] = field(default_factory=dict)

    @classmethod
    def single(cls, value: float) -> Sample:
        """Returns what was measured only once."""
        return cls(value, value, 1)

    @classmethod
    def merged(cls, samples: Sequence[Sample], more_is_better: bool) -> Sample:
        """Merges the samples of several turns, each with the same weight."""
        worst = min if more_is_better else max
        return cls(
            statistics.median(sample.value for sample in samples),
            worst(sample.worst for sample in samples),
            sum(sample.repeats for sample in samples),
            samples[-1].more,
        )

    def divided(self, number: int) -> Sample:
        """Returns the share of each of that many operations, which were measured together."""
        return Sample(self.value / number, self.worst / number, self.repeats)


@dataclass(frozen=True)
class Sampling:
    """How long and how often to repeat a workload.

    Attributes:
        seconds: how long to repeat it, after a warm-up of a quarter of this.
        min_repeats: the minimum number of repeats, however long they take.
        scale: a factor for the sizes of batches; below 1 in tests.
    """

    seconds: float = 0.3
    min_repeats: int = 5
    scale: float = 1.0

    def divided(self, turns: int) -> Sampling:
        """Returns the share of each turn if there are several."""
        return replace(
            self, seconds=self.seconds / turns, min_repeats=-(-self.min_repeats // turns)
        )

    def scaled(self, count: int) -> int:
        """Returns the size of a batch that has ``count`` elements at scale 1."""
        return max(1, round(count * self.scale))

    def time(self, once: Callable[[], object]) -> Sample:
        """Measures the seconds that a call of ``once`` takes."""
        return self.of_batches(lambda: seconds_of(once))

    def of_batches(self, batch: Callable[[], float]) -> Sample:
        """Samples what ``batch`` returns."""
        self._repeat(batch, self.seconds / 4, 1)
        values = self._repeat(batch, self.seconds, self.min_repeats)
        return Sample(statistics.median(values), max(values), len(values))

    def rate(self, batch: Callable[[], object], count: int) -> Sample:
        """Measures operations per second; each call of ``batch`` performs ``count``."""
        sample = self.time(batch)
        return Sample(count / sample.value, count / sample.worst, sample.repeats)

    @staticmethod
    def _repeat(batch: Callable[[], float], seconds: float, min_repeats: int) -> list[float]:
        values: list[float] = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(values) < min_repeats:
            values.append(batch())
        return values


def seconds_of(operation: Callable[[], object]) -> float:
    """Returns the seconds that an operation takes."""
    begun = time.perf_counter()
    operation()
    return time.perf_counter() - begun


@dataclass(frozen=True)
class Session:
    """The context in which a workload runs, on worker 0 of a mesh.

    Attributes:
        participant: the library's name, or ``limit``.
        sampling: how long and how often to repeat the workload.
        workers: the number of workers in the mesh.
        device: the device that tensors are on; empty for the CPU.
        library: the `zrpc.bench.library.Library` that is measured.
        raw: the bare ZeroMQ connection to the peer, in a mesh that measures limits.
    """

    participant: str
    sampling: Sampling
    workers: int
    device: str = ""
    library: Any = field(default=None, repr=False)
    raw: Any = field(default=None, repr=False)

    def tensor(self, size: int, value: float) -> torch.Tensor:
        """Returns a tensor of ``size`` bytes, in memory that has been written to."""
        import torch

        return torch.full((size // 4,), value, device=self.device or "cpu")

    def time(self, once: Callable[[], object]) -> Sample:
        """Measures the seconds for one operation, the work of the device included."""
        if not self.device:
            return self.sampling.time(once)
        import torch

        finish = torch.get_device_module(self.device).synchronize
        return self.sampling.time(lambda: (once(), finish()))

    @property
    def others(self) -> list[str]:
        """The names of all other workers."""
        return [f"worker{rank}" for rank in range(1, self.workers)]

    def call_others(self, function: Callable[..., Any], args: tuple[object, ...] = ()) -> list[Any]:
        """Calls a function on all other workers at once, and returns their results."""
        futures = [self.rpc.rpc_async(each, function, args=args) for each in self.others]
        return [future.wait() for future in futures]

    @property
    def rpc(self) -> Any:
        """The library's module with ``rpc_sync``, ``rpc_async`` and ``remote``."""
        return self.library.rpc

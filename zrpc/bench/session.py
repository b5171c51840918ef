"""The session that a workload is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from zrpc.bench.sampling import Sample, Sampling

__all__ = ["PEER", "Session"]

# Workloads run on worker0 and call this worker.
PEER = "worker1"


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

    @property
    def autograd(self) -> Any:
        """The library's module with ``context`` and ``backward``."""
        return self.library.autograd

    @property
    def optim(self) -> Any:
        """The library's module with ``DistributedOptimizer``."""
        return self.library.optim

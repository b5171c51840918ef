"""What a workload is given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zrpc.bench.effort import Effort
    from zrpc.bench.library import Library
    from zrpc.bench.raw import RawPeer

__all__ = ["PEER", "Session"]

# Workloads run on worker0 and call this one.
PEER = "worker1"


@dataclass(frozen=True)
class Session:
    """A workload's surroundings, on worker 0 of a mesh.

    Attributes:
        participant: the library's name, or ``limit``.
        effort: how much to measure.
        workers: how many workers the mesh has.
    """

    participant: str
    effort: Effort
    workers: int
    _library: Library | None = field(default=None, repr=False)
    _raw: RawPeer | None = field(default=None, repr=False)

    @property
    def rpc(self) -> Any:
        """The library's module with ``rpc_sync`` and the like."""
        assert self._library is not None
        return self._library.rpc

    @property
    def autograd(self) -> Any:
        """The library's module with ``context`` and ``backward``."""
        assert self._library is not None
        return self._library.autograd

    @property
    def raw(self) -> RawPeer:
        """The bare ZeroMQ connection of a mesh for limits."""
        assert self._raw is not None
        return self._raw

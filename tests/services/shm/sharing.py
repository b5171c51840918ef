"""What the tests of shared memory look at: segments, loans, descriptors and mappings."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import pytest
import torch

import zrpc
from tests.support.waiting import until
from zrpc.agent.current import current_agent
from zrpc.services.shm.segments import Segment
from zrpc.services.shm.service import SharedMemoryService
from zrpc.testing import Mesh

# Elements of a float32 tensor of 1 MiB: well above what goes by shared memory.
LARGE = 1 << 18
MIB = 1 << 20

# The marks of a module whose workers send by shared memory.
sends_by_segments = [
    pytest.mark.zrpc(workers=2, timeout=90, options={"rpc_timeout": 40}),
]
processes = pytest.mark.zrpc(processes=True)


def large(value: float, count: int = LARGE) -> torch.Tensor:
    """A tensor of its own memory, all of whose elements are different from another value's."""
    return torch.arange(count, dtype=torch.float32).add_(1000 * value)


def kept() -> dict[Any, Any]:
    """What this process keeps, by name.

    Functions go to worker processes by value: each time with globals of their own. So what is
    to last is kept in a module that they import.
    """
    import zrpc.testing.spec as anywhere

    found: dict[Any, Any] = anywhere.__dict__.setdefault("kept", {})
    return found


def keep(name: Any, value: Any) -> None:
    kept()[name] = value


def drop(*names: Any) -> None:
    for name in names:
        del kept()[name]


def service_of(mesh: Mesh, worker: int) -> SharedMemoryService:
    return mesh.agent(worker).service(SharedMemoryService)


def own_layer() -> SharedMemoryService:
    return current_agent().service(SharedMemoryService)


def until_returned(layer: SharedMemoryService, lent: int = 0) -> None:
    """Waits until no more than this many of a sender's segments are lent."""
    until(
        lambda: layer.pool.lent <= lent,
        lambda: f"{layer.pool.lent} lent, expected {lent}",
        collect=True,
    )


def inode_of(segment: Segment) -> int:
    return os.fstat(segment.fd).st_ino


def segments_open() -> list[int]:
    """The inodes of the memfds of zrpc that this process has open, each once."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is gone
            if os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:zrpc"):
                found.add(os.fstat(int(fd)).st_ino)
    return sorted(found)


def segments_mapped() -> list[int]:
    """The inodes of the memfds of zrpc that this process has mapped, each once."""
    with open("/proc/self/maps") as maps:
        return sorted({int(line.split()[4]) for line in maps if "/memfd:zrpc" in line})


def send_on(rank: Any, count: Any) -> Any:
    """Sends to a worker by shared memory, and looks at each answer; the segments used."""
    layer = own_layer()
    numbers = set()
    for i in range(count):
        future = zrpc.rpc_async(rank, torch.neg, (large(100 + i),))
        numbers.update(layer.pool.segments)
        assert torch.equal(future.wait(), -large(100 + i))
    return numbers


def kept_are_equal(count: Any) -> Any:
    return all(torch.equal(kept()[i], large(i)) for i in range(count))

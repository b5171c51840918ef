"""Workloads: sending tensors."""

from __future__ import annotations

import time

import torch

from zrpc.bench import targets
from zrpc.bench.calls import check
from zrpc.bench.sampling import Sample
from zrpc.bench.session import PEER, Session

__all__ = ["echo", "echo_many", "fan_out", "first_large", "one_way"]

_ELEMENT = 7.0


def _tensor(size: int) -> torch.Tensor:
    """Returns a tensor of ``size`` bytes, in memory that has been written to."""
    return torch.full((size // 4,), _ELEMENT)


def one_way(session: Session, size: int) -> Sample:
    """Sends a tensor and gets its last element back."""
    rpc_sync = session.rpc.rpc_sync
    tensor = _tensor(size)
    check("the last element", rpc_sync(PEER, targets.take, args=(tensor,)), _ELEMENT)
    return session.sampling.time(lambda: rpc_sync(PEER, targets.take, args=(tensor,)))


def echo(session: Session, size: int) -> Sample:
    """Sends a tensor and gets it back."""
    rpc_sync = session.rpc.rpc_sync
    tensor = _tensor(size)
    back = rpc_sync(PEER, targets.echo, args=(tensor,))
    check("the echo to be equal", torch.equal(back, tensor), True)
    del back  # while a result is kept, its memory can't be reused
    return session.sampling.time(lambda: rpc_sync(PEER, targets.echo, args=(tensor,)))


def echo_many(session: Session, count: int, size: int) -> Sample:
    """Sends a list of tensors and gets it back."""
    rpc_sync = session.rpc.rpc_sync
    tensors = [_tensor(size) for _ in range(count)]
    back = rpc_sync(PEER, targets.echo, args=(tensors,))
    equal = all(torch.equal(one, other) for one, other in zip(back, tensors, strict=True))
    check("the echo to be equal", equal, True)
    del back
    return session.sampling.time(lambda: rpc_sync(PEER, targets.echo, args=(tensors,)))


def fan_out(session: Session, size: int) -> Sample:
    """Sends one tensor to all other workers at once."""
    rpc_async = session.rpc.rpc_async
    tensor = _tensor(size)
    peers = [f"worker{rank}" for rank in range(1, session.workers)]

    def once() -> list[float]:
        futures = [rpc_async(peer, targets.take, args=(tensor,)) for peer in peers]
        return [future.wait() for future in futures]

    check("the last elements", once(), [_ELEMENT] * len(peers))
    return session.sampling.time(once)


def first_large(session: Session, size: int) -> Sample:
    """Has all other workers send one tensor each to worker 0, and get one of that size back.

    It is measured once, in a mesh that has not sent anything large.
    """
    count = session.sampling.scaled(size // 4)
    rpc_async = session.rpc.rpc_async
    others = [f"worker{rank}" for rank in range(1, session.workers)]
    for future in [rpc_async(each, targets.prepare_push, args=(count,)) for each in others]:
        future.wait()
    begun = time.perf_counter()
    futures = [rpc_async(each, targets.push, args=("worker0", count)) for each in others]
    last = max(future.wait() for future in futures)
    seconds = time.perf_counter() - begun
    check("the sum of all", last, float(len(others)))
    return Sample(seconds, seconds, 1)

"""Workloads: tensors that travel."""

from __future__ import annotations

import torch

from zrpc.bench import targets
from zrpc.bench.calls import check
from zrpc.bench.effort import Sample
from zrpc.bench.session import PEER, Session

__all__ = ["echo", "echo_many", "fan_out", "one_way"]

_MARK = 7.0


def _tensor(size: int) -> torch.Tensor:
    """A tensor of that many bytes, in memory that was touched."""
    return torch.full((size // 4,), _MARK)


def one_way(session: Session, size: int) -> Sample:
    """A tensor goes there, its last element comes back."""
    rpc_sync = session.rpc.rpc_sync
    tensor = _tensor(size)
    check("the last element", rpc_sync(PEER, targets.take, args=(tensor,)), _MARK)
    return session.effort.time(lambda: rpc_sync(PEER, targets.take, args=(tensor,)))


def echo(session: Session, size: int) -> Sample:
    """A tensor goes there and comes back."""
    rpc_sync = session.rpc.rpc_sync
    tensor = _tensor(size)
    back = rpc_sync(PEER, targets.echo, args=(tensor,))
    check("the echo to be equal", torch.equal(back, tensor), True)
    del back  # a result that is kept is memory that can't be used again
    return session.effort.time(lambda: rpc_sync(PEER, targets.echo, args=(tensor,)))


def echo_many(session: Session, count: int, size: int) -> Sample:
    """A list of tensors goes there and comes back."""
    rpc_sync = session.rpc.rpc_sync
    tensors = [_tensor(size) for _ in range(count)]
    back = rpc_sync(PEER, targets.echo, args=(tensors,))
    equal = all(torch.equal(one, other) for one, other in zip(back, tensors, strict=True))
    check("the echo to be equal", equal, True)
    del back
    return session.effort.time(lambda: rpc_sync(PEER, targets.echo, args=(tensors,)))


def fan_out(session: Session, size: int) -> Sample:
    """One tensor goes to all other workers at once."""
    rpc_async = session.rpc.rpc_async
    tensor = _tensor(size)
    peers = [f"worker{rank}" for rank in range(1, session.workers)]

    def once() -> list[float]:
        futures = [rpc_async(peer, targets.take, args=(tensor,)) for peer in peers]
        return [future.wait() for future in futures]

    check("the last elements", once(), [_MARK] * len(peers))
    return session.effort.time(once)

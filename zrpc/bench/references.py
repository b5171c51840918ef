"""Workloads: remote references."""

from __future__ import annotations

import torch

from zrpc.bench import targets
from zrpc.bench.calls import check
from zrpc.bench.effort import Sample
from zrpc.bench.session import PEER, Session

__all__ = ["made_and_dropped", "method", "remote_to_here"]

_BATCH = 500


def remote_to_here(session: Session) -> Sample:
    """A value is made at the peer and fetched."""
    remote = session.rpc.remote
    operands = (torch.ones(2), torch.ones(2))
    check("the value", remote(PEER, torch.add, args=operands).to_here().tolist(), [2.0, 2.0])
    return session.effort.time(lambda: remote(PEER, torch.add, args=operands).to_here())


def method(session: Session) -> Sample:
    """A method of an object at the peer is called."""
    counter = session.rpc.remote(PEER, targets.Counter)
    check("the count", counter.rpc_sync().increment(), 1)
    return session.effort.time(lambda: counter.rpc_sync().increment())


def made_and_dropped(session: Session) -> Sample:
    """Objects are made at the peer and dropped here, until none of them is alive there."""
    rpc_sync, remote = session.rpc.rpc_sync, session.rpc.remote
    count = session.effort.scaled(_BATCH)
    _, expected = rpc_sync(PEER, targets.things)

    def batch() -> None:
        nonlocal expected
        expected += count
        references = [remote(PEER, targets.Thing) for _ in range(count)]
        del references
        while rpc_sync(PEER, targets.things) != (0, expected):
            pass

    return session.effort.rate(batch, count)

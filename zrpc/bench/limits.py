"""Workloads without an RPC library: what none can be faster than."""

from __future__ import annotations

import torch

from zrpc.bench import targets
from zrpc.bench.autograd import BATCH
from zrpc.bench.effort import Sample
from zrpc.bench.session import Session

__all__ = ["echo", "local_step", "memcpy", "memory", "one_way", "pipelined"]

_SMALL = b"x" * 16
_BATCH = 1000


def echo(session: Session, size: int, times: int) -> Sample:
    """A frame goes there and comes back over ZeroMQ, ``times`` times in turn."""
    peer, data = session.raw, b"x" * size

    def once() -> None:
        for _ in range(times):
            peer.echo(data)

    return session.effort.time(once)


def one_way(session: Session, size: int) -> Sample:
    """A frame goes there over ZeroMQ, an empty one comes back."""
    peer, data = session.raw, b"x" * size
    return session.effort.time(lambda: peer.one_way(data))


def pipelined(session: Session) -> Sample:
    """Small frames there and back over ZeroMQ, many at once."""
    peer, count = session.raw, session.effort.scaled(_BATCH)
    return session.effort.rate(lambda: peer.pipelined(_SMALL, count), count)


def memcpy(session: Session, size: int, times: int) -> Sample:
    """A tensor is copied to memory that was touched before, ``times`` times."""
    source = torch.full((size // 4,), 1.0)
    target = torch.zeros_like(source)

    def once() -> None:
        for _ in range(times):
            target.copy_(source)

    return session.effort.time(once)


def local_step(session: Session, width: int) -> Sample:
    """The autograd step in one process, and four ZeroMQ echoes for its calls and gradients."""
    peer, data = session.raw, b"x" * (BATCH * width * 4)
    here, there = targets.linear(width), torch.nn.Linear(width, width)
    parameters = [*here.parameters(), *there.parameters()]
    inputs = torch.ones(BATCH, width)

    def once() -> None:
        loss = there(there(here(inputs))).sum()
        torch.autograd.grad(loss, parameters)
        for _ in range(4):  # twice activations go there and back, and twice gradients
            peer.echo(data)

    return session.effort.time(once)


def memory(session: Session) -> Sample:
    """The resident memory of a process that has only imported torch."""
    size = targets.resident()
    return Sample(size, size, 1)

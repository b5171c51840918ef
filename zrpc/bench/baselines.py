"""Workloads without an RPC library: bounds on how fast one can be."""

from __future__ import annotations

import torch

from zrpc.bench import targets
from zrpc.bench.autograd import BATCH_SIZE
from zrpc.bench.session import Sample, Session

_SMALL = b"x" * 16
_FRAMES_PER_BATCH = 1000


def echo(session: Session, size: int, times: int) -> Sample:
    """Sends a frame over ZeroMQ and receives it back, ``times`` times in sequence."""
    peer, data = session.raw, b"x" * size

    def once() -> None:
        for _ in range(times):
            peer.echo(data)

    return session.sampling.time(once)


def one_way(session: Session, size: int) -> Sample:
    """Sends a frame over ZeroMQ and receives an empty one."""
    peer, data = session.raw, b"x" * size
    return session.sampling.time(lambda: peer.one_way(data))


def pipelined(session: Session) -> Sample:
    """Sends many small frames over ZeroMQ, then receives them all back."""
    peer, count = session.raw, session.sampling.scaled(_FRAMES_PER_BATCH)
    return session.sampling.rate(lambda: peer.pipelined(_SMALL, count), count)


def memcpy(session: Session, size: int, times: int) -> Sample:
    """Copies a tensor to memory that was used before, ``times`` times."""
    source = session.tensor(size, 1.0)
    target = torch.zeros_like(source)

    def once() -> None:
        for _ in range(times):
            target.copy_(source)

    return session.time(once)


def local_step(session: Session, width: int) -> Sample:
    """Runs the autograd step in one process, plus four ZeroMQ echoes for calls and gradients."""
    peer, data = session.raw, b"x" * (BATCH_SIZE * width * 4)
    here, there = targets.linear(width), torch.nn.Linear(width, width)
    parameters = [*here.parameters(), *there.parameters()]
    inputs = torch.ones(BATCH_SIZE, width)

    def once() -> None:
        loss = there(there(here(inputs))).sum()
        torch.autograd.grad(loss, parameters)
        for _ in range(4):  # two round trips of activations, two of gradients
            peer.echo(data)

    return session.sampling.time(once)


def memory(session: Session) -> Sample:
    """Measures the resident memory of a process that has only imported torch."""
    return Sample.single(targets.resident())

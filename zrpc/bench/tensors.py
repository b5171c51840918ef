"""Workloads: sending tensors."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from zrpc.bench import targets
from zrpc.bench.calls import check
from zrpc.bench.session import PEER, Sample, Session

ELEMENT_BYTES = 4
# The name of the weights that are published.
WEIGHTS = "benchmark"
_ELEMENT = 7.0


def one_way(session: Session, size: int) -> Sample:
    """Sends a tensor and gets its last element back."""
    rpc_sync = session.rpc.rpc_sync
    tensor = session.tensor(size, _ELEMENT)
    check("the last element", rpc_sync(PEER, targets.take, args=(tensor,)), _ELEMENT)
    return session.sampling.time(lambda: rpc_sync(PEER, targets.take, args=(tensor,)))


def echo(session: Session, size: int) -> Sample:
    """Sends a tensor and gets it back."""
    return _echo(session, session.tensor(size, _ELEMENT))


def compiled_echo(session: Session, size: int) -> Sample:
    """Sends a tensor, or None, and gets it back: by a graph that was compiled, if there are any."""
    value = session.tensor(size, _ELEMENT) if size else None
    if session.participant == "zrpc":
        return _echo(session, value)
    with session.rpc.compiled(PEER, targets.echo, size) as echo:
        return _time_echo(session, echo, value)


def echo_many(session: Session, count: int, size: int) -> Sample:
    """Sends a list of tensors and gets it back."""
    return _echo(session, [session.tensor(size, _ELEMENT) for _ in range(count)])


def _echo(session: Session, value: Any) -> Sample:
    rpc_sync = session.rpc.rpc_sync
    return _time_echo(session, lambda sent: rpc_sync(PEER, targets.echo, args=(sent,)), value)


def _time_echo(session: Session, echo: Callable[[Any], Any], value: Any) -> Sample:
    # No result is kept: its memory could not be reused.
    torch.testing.assert_close(echo(value), value, rtol=0, atol=0)
    return session.time(lambda: echo(value))


def fan_out(session: Session, size: int) -> Sample:
    """Sends one tensor to all other workers at once."""
    tensor = session.tensor(size, _ELEMENT)

    def once() -> list[float]:
        return session.call_others(targets.take, (tensor,))

    check("the last elements", once(), [_ELEMENT] * (session.workers - 1))
    return session.sampling.time(once)


def to_group(session: Session, size: int) -> Sample:
    """Sends one tensor to all other workers by one call of a group."""
    rpc, tensor = session.rpc, session.tensor(session.sampling.scaled(size), _ELEMENT)
    others = rpc.group(session.others)
    found = rpc.rpc_sync(others, targets.take, args=(tensor,))
    check("the last elements", found, [_ELEMENT] * (session.workers - 1))
    return session.sampling.time(lambda: rpc.rpc_sync(others, targets.take, args=(tensor,)))


def first_large(session: Session, size: int) -> Sample:
    """Pushes one tensor from each other worker to worker 0, and one of that size back.

    It is measured once, in a mesh that has not sent anything large.
    """
    count = session.sampling.scaled(size // 4)
    session.call_others(targets.prepare_push, (count,))
    begun = time.perf_counter()
    last = max(session.call_others(targets.push, ("worker0", count)))
    sample = Sample.single(time.perf_counter() - begun)
    check("the sum of all", last, float(session.workers - 1))
    return sample


def many_clients(session: Session, size: int) -> Sample:
    """Does the same repeatedly, as the clients of a parameter server; the time of each client."""
    count = session.sampling.scaled(size // 4)
    session.call_others(targets.prepare_push, (count,))
    sample = session.sampling.time(lambda: session.call_others(targets.push, ("worker0", count)))
    return sample.divided(session.workers - 1)


def all_to_all(session: Session, size: int) -> Sample:
    """Sends a tensor from each worker to each other one; the time of each tensor."""
    count, workers = session.sampling.scaled(size // 4), session.workers

    def once() -> None:
        futures = [
            session.rpc.rpc_async(other, targets.send_to_others, (rank, workers, count))
            for rank, other in enumerate(session.others, 1)
        ]
        found = [targets.send_to_others(0, workers, count), *(each.wait() for each in futures)]
        check("the numbers of tensors", found, [workers - 1] * workers)

    return session.sampling.time(once).divided(workers * (workers - 1))


def to_subscribers(session: Session, size: int) -> Sample:
    """Pushes a version, which all other workers load into models of their own.

    A library without published weights sends the model by one call, and its workers copy it.
    """
    rpc, others = session.rpc, session.rpc.group(session.others)
    number = session.sampling.scaled(size // ELEMENT_BYTES)
    model = targets.new_model(number)
    if session.participant != "zrpc":
        return session.sampling.time(lambda: rpc.rpc_sync(others, targets.load, args=(model,)))
    with rpc.nn.publish(WEIGHTS, model) as published:

        def once() -> None:
            version = published.push()
            found = rpc.rpc_sync(others, targets.load_version, args=(WEIGHTS, number, version))
            check("the versions", found, [version] * (session.workers - 1))

        sample = session.sampling.time(once)
        rpc.rpc_sync(others, targets.unsubscribe)
    return sample

"""Workloads: sending tensors."""

from __future__ import annotations

import time

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
    rpc_sync = session.rpc.rpc_sync
    tensor = session.tensor(size, _ELEMENT)
    back = rpc_sync(PEER, targets.echo, args=(tensor,))
    check("the echo to be equal", torch.equal(back, tensor), True)
    del back  # while a result is kept, its memory can't be reused
    return session.time(lambda: rpc_sync(PEER, targets.echo, args=(tensor,)))


def compiled_echo(session: Session, size: int) -> Sample:
    """Sends a tensor, or None, and gets it back: by a graph that was compiled, if there are any."""
    value = session.tensor(size, _ELEMENT) if size else None
    if session.participant == "zrpc":
        rpc_sync = session.rpc.rpc_sync
        return session.sampling.time(lambda: rpc_sync(PEER, targets.echo, args=(value,)))
    with session.rpc.compiled(PEER, targets.echo, size) as echo:
        if value is not None:
            check("the echo to be equal", torch.equal(echo(value), value), True)
        return session.sampling.time(lambda: echo(value))


def echo_many(session: Session, count: int, size: int) -> Sample:
    """Sends a list of tensors and gets it back."""
    rpc_sync = session.rpc.rpc_sync
    tensors = [session.tensor(size, _ELEMENT) for _ in range(count)]
    back = rpc_sync(PEER, targets.echo, args=(tensors,))
    equal = all(torch.equal(one, other) for one, other in zip(back, tensors, strict=True))
    check("the echo to be equal", equal, True)
    del back
    return session.time(lambda: rpc_sync(PEER, targets.echo, args=(tensors,)))


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
    seconds = time.perf_counter() - begun
    check("the sum of all", last, float(session.workers - 1))
    return Sample(seconds, seconds, 1)


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

        def sent() -> None:
            rpc.rpc_sync(others, targets.load, args=(model,))

        return session.sampling.time(sent)
    with rpc.nn.publish(WEIGHTS, model) as published:

        def once() -> None:
            version = published.push()
            found = rpc.rpc_sync(others, targets.load_version, args=(WEIGHTS, number, version))
            check("the versions", found, [version] * (session.workers - 1))

        sample = session.sampling.time(once)
        rpc.rpc_sync(others, targets.unsubscribe)
    return sample

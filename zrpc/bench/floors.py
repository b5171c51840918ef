"""Workloads: how many times as long one operation takes as what is the least for it.

Both are measured in turn, A B A B, so what else the machine does has little influence on the ratio.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from zrpc.bench import targets
from zrpc.bench.references import actor_of
from zrpc.bench.session import PEER, Sample, Session, seconds_of
from zrpc.bench.tensors import ELEMENT_BYTES, WEIGHTS

_CALLS_PER_BATCH = 100
# Before that, segments of shared memory are new to the publisher or to its reader.
_FIRST_PUSHES = 4


def actor_call(session: Session) -> Sample:
    """Compares a call of an actor with one of an object that is none."""
    plain = session.rpc.remote(PEER, targets.Counter)
    actor = session.rpc.remote(PEER, actor_of(session))
    count = session.sampling.scaled(_CALLS_PER_BATCH)

    def calls(of: Callable[[], object]) -> float:
        return sorted(seconds_of(of) for _ in range(count))[count // 2]

    def ratio() -> float:
        least = calls(lambda: plain.rpc_sync().increment())
        return calls(lambda: actor.rpc_sync().increment()) / least

    return session.sampling.of_batches(ratio)


def group_call(session: Session, size: int) -> Sample:
    """Compares a tensor to all other workers with a copy of it and an empty call to each."""
    rpc, others = session.rpc, session.rpc.group(session.others)
    tensor = torch.ones(session.sampling.scaled(size // ELEMENT_BYTES))
    copy = torch.zeros_like(tensor)

    def least() -> None:
        copy.copy_(tensor)
        for other in session.others:
            rpc.rpc_sync(other, targets.nothing)

    def sent() -> None:
        rpc.rpc_sync(others, targets.take, args=(tensor,))

    least()
    sent()
    return session.sampling.of_batches(lambda: seconds_of(sent) / seconds_of(least))


def push(session: Session, size: int) -> Sample:
    """Compares a push of weights, whose versions the peer loads, with a copy of the model."""
    return _versions(session, size)[0]


def load(session: Session, size: int) -> Sample:
    """Compares a load of weights into the peer's model with a copy of that model."""
    return _versions(session, size)[1]


def _versions(session: Session, size: int) -> tuple[Sample, Sample]:
    rpc, number = session.rpc, session.sampling.scaled(size // ELEMENT_BYTES)
    model, copy = targets.new_model(number), targets.new_model(number)
    loads: list[float] = []
    with rpc.nn.publish(WEIGHTS, model) as published:

        def once() -> float:
            push = seconds_of(published.push)
            least = seconds_of(lambda: targets.copy_model(model, copy))
            arguments = WEIGHTS, number, published.version
            loads.append(rpc.rpc_sync(PEER, targets.time_of_load, args=arguments))
            return push / least

        for _ in range(_FIRST_PUSHES):
            once()
        pushes = session.sampling.of_batches(once)
        rpc.rpc_sync(PEER, targets.unsubscribe)
    measured = sorted(loads[-pushes.repeats :])
    return pushes, Sample(measured[len(measured) // 2], measured[-1], len(measured))

"""Workloads: remote references."""

from __future__ import annotations

from typing import Any

import torch

from zrpc.actors import actor
from zrpc.bench import targets
from zrpc.bench.calls import check
from zrpc.bench.session import PEER, Sample, Session

_RREFS_PER_BATCH = 500


def remote_to_here(session: Session) -> Sample:
    """Creates a value on the peer and fetches it."""
    remote = session.rpc.remote
    operands = (torch.ones(2), torch.ones(2))
    check("the value", remote(PEER, torch.add, args=operands).to_here().tolist(), [2.0, 2.0])
    return session.sampling.time(lambda: remote(PEER, torch.add, args=operands).to_here())


def method(session: Session) -> Sample:
    """Calls a method of an object on the peer."""
    return _increments(session, targets.Counter)


def actor_call(session: Session) -> Sample:
    """Calls a method of an actor on the peer."""
    return _increments(session, actor_of(session))


def _increments(session: Session, counted: Any) -> Sample:
    counter = session.rpc.remote(PEER, counted)
    check("the count", counter.rpc_sync().increment(), 1)
    return session.sampling.time(lambda: counter.rpc_sync().increment())


def actor_calls_in_flight(session: Session, count: int) -> Sample:
    """Makes ``count`` calls of an actor before it waits for them; the time of each."""
    counter = session.rpc.remote(PEER, actor_of(session))
    total = 0

    def calls() -> None:
        nonlocal total
        total += count
        futures = [counter.rpc_async().increment() for _ in range(count)]
        results = [future.wait() for future in futures]
        check("the highest count", max(results), total)  # torch runs them at once

    return session.sampling.time(calls).divided(count)


def actor_of(session: Session) -> Any:
    """Returns a class whose instances are actors; plain objects in torch's RPC, which has none."""
    if session.participant == "zrpc":
        return actor(targets.Counter, concurrency=1)
    return targets.Counter


def made_and_dropped(session: Session) -> Sample:
    """Creates objects on the peer, drops their RRefs here, and waits until all are deleted."""
    rpc_sync, remote = session.rpc.rpc_sync, session.rpc.remote
    count = session.sampling.scaled(_RREFS_PER_BATCH)
    _, expected = rpc_sync(PEER, targets.things)

    def batch() -> None:
        nonlocal expected
        expected += count
        references = [remote(PEER, targets.Thing) for _ in range(count)]
        del references
        while rpc_sync(PEER, targets.things) != (0, expected):
            pass

    return session.sampling.rate(batch, count)

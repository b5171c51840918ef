"""Workloads: streams of items that the peer makes."""

from __future__ import annotations

from zrpc.bench import targets
from zrpc.bench.calls import check
from zrpc.bench.sampling import Sample
from zrpc.bench.session import PEER, Session


def small_items(session: Session, count: int) -> Sample:
    """Reads a stream of numbers."""
    rpc_stream, count = session.rpc.rpc_stream, session.sampling.scaled(count)

    def once() -> None:
        total = sum(rpc_stream(PEER, targets.numbers, args=(count,)))
        check("the sum", total, count * (count - 1) // 2)

    return session.sampling.rate(once, count)


def large_items(session: Session, count: int, size: int) -> Sample:
    """Reads a stream of tensors of ``size`` bytes."""
    rpc_stream, count = session.rpc.rpc_stream, session.sampling.scaled(count)

    def once() -> None:
        found = map(targets.take, rpc_stream(PEER, targets.tensors, args=(count, size)))
        check("the sum of the last elements", sum(found), count * 1.0)

    return session.sampling.time(once)

"""Workloads: items that go through queues and streams, and calls that are answered in batches."""

from __future__ import annotations

import zrpc
from zrpc.bench import targets
from zrpc.bench.calls import check
from zrpc.bench.session import PEER, Sample, Session

_ITEMS_PER_TURN = 500
_ITEMS_PER_BATCH = 32


@zrpc.batched(max_size=64, max_wait=0.01)
def numbered(numbers: list[int]) -> list[tuple[int, int]]:
    """Returns each number with that of the calls in its batch."""
    return [(number, len(numbers)) for number in numbers]


def one_by_one(session: Session) -> Sample:
    """Puts an item into a queue on the peer and takes it out again, one at a time."""
    queue = session.rpc.remote(PEER, zrpc.Queue)
    count = session.sampling.scaled(_ITEMS_PER_TURN)

    def turn() -> None:
        for number in range(count):
            queue.rpc_sync().put(number)
            check("the item", queue.rpc_sync().get(), number)

    return session.sampling.rate(turn, count)


def by_batches(session: Session) -> Sample:
    """Puts many items before it waits for them, and takes them out in batches."""
    queue = session.rpc.remote(PEER, zrpc.Queue)
    count = session.sampling.scaled(_ITEMS_PER_TURN)

    def turn() -> None:
        puts = [queue.rpc_async().put(number) for number in range(count)]
        left = count
        while left:
            left -= len(queue.rpc_sync().get_batch(_ITEMS_PER_BATCH))
        for put in puts:
            put.wait()

    return session.sampling.rate(turn, count)


def batched(session: Session, callers: int) -> Sample:
    """Makes calls that become one batch, and waits for all."""
    rpc_async = session.rpc.rpc_async

    def once() -> list[tuple[int, int]]:
        futures = [rpc_async(PEER, numbered, args=(number,)) for number in range(callers)]
        return [future.wait() for future in futures]

    check("the results", [number for number, _ in once()], list(range(callers)))
    return session.sampling.time(once)


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

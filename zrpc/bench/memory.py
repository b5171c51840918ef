"""Workloads: resident memory of a worker."""

from __future__ import annotations

from zrpc.bench import targets
from zrpc.bench.effort import Sample
from zrpc.bench.session import PEER, Session

__all__ = ["after_calls", "after_start"]

_AT_ONCE = 100


def after_start(session: Session) -> Sample:
    """The mean of the two workers' resident memory."""
    sizes = [targets.resident(), session.rpc.rpc_sync(PEER, targets.resident)]
    return Sample(sum(sizes) / len(sizes), max(sizes), 1)


def after_calls(session: Session, count: int) -> Sample:
    """The same after ``count`` empty calls, a hundred at a time."""
    count = session.effort.scaled(count)
    for start in range(0, count, _AT_ONCE):
        number = min(_AT_ONCE, count - start)
        for future in [session.rpc.rpc_async(PEER, targets.nothing) for _ in range(number)]:
            future.wait()
    return after_start(session)

"""Workloads: the memory and descriptors of a worker."""

from __future__ import annotations

import os

from zrpc.bench import targets
from zrpc.bench.machine import read_kib
from zrpc.bench.sampling import Sample
from zrpc.bench.session import PEER, Session

_MAX_IN_FLIGHT = 100


def after_start(session: Session) -> Sample:
    """Measures the mean resident memory of the two workers."""
    sizes = [targets.resident(), session.rpc.rpc_sync(PEER, targets.resident)]
    return Sample(sum(sizes) / len(sizes), max(sizes), 1)


def after_calls(session: Session, count: int) -> Sample:
    """Measures it after ``count`` empty calls, at most 100 of them in flight."""
    count = session.sampling.scaled(count)
    for start in range(0, count, _MAX_IN_FLIGHT):
        number = min(_MAX_IN_FLIGHT, count - start)
        for future in [session.rpc.rpc_async(PEER, targets.nothing) for _ in range(number)]:
            future.wait()
    return after_start(session)


def descriptors(session: Session) -> Sample:
    """Counts the open descriptors of worker 0."""
    return _entries_of("/proc/self/fd")


def threads(session: Session) -> Sample:
    """Counts the threads of worker 0, those of ZeroMQ included."""
    return _entries_of("/proc/self/task")


def _entries_of(directory: str) -> Sample:
    count = len(os.listdir(directory))
    return Sample(count, count, 1)


def private_memory(session: Session) -> Sample:
    """Measures the memory that worker 0 shares with no other process, in bytes."""
    size = read_kib("/proc/self/smaps_rollup", "Private_Clean", "Private_Dirty")
    return Sample(size, size, 1)

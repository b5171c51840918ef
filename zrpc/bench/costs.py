"""Workloads: what calls and steps cost whatever else the machine does, and what a worker uses.

The time of a call depends on how soon a busy machine wakes a thread. These numbers hardly do. Those
of calls and steps are for both workers together.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from zrpc.bench import targets
from zrpc.bench.autograd import training_step
from zrpc.bench.calls import call_at_once
from zrpc.bench.machine import read_kib
from zrpc.bench.session import PEER, Sample, Session

_OPERATIONS_PER_BATCH = 50
# A question to the peer about its count is itself a message, and so is the answer.
_MESSAGES_TO_ASK = 2
_MAX_IN_FLIGHT = 100


def processor_time(session: Session, width: int) -> Sample:
    """Measures the processor time, in seconds, of a step of this width; of an empty call if 0."""
    return _measure(session, width, time.process_time)


def context_switches(session: Session, width: int) -> Sample:
    """Counts how often a thread waits or loses its core; ``width`` as in `processor_time`."""
    return _measure(session, width, targets.context_switches)


def messages(session: Session, width: int) -> Sample:
    """Counts the messages that arrive; ``width`` as in `processor_time`. Only zrpc counts them."""
    return _measure(session, width, targets.messages, _MESSAGES_TO_ASK)


def _measure(
    session: Session, width: int, meter: Callable[[], float], to_ask: float = 0.0
) -> Sample:
    """Measures how much further ``meter`` goes on both workers for each operation."""
    rpc_sync = session.rpc.rpc_sync
    operation = training_step(session, width) if width else lambda: rpc_sync(PEER, targets.nothing)

    def total() -> float:
        # The peer's first: its answer has arrived when this worker's is read.
        return sum((rpc_sync(PEER, meter), meter()))

    def batch() -> float:
        before = total()
        for _ in range(_OPERATIONS_PER_BATCH):
            operation()
        return (total() - before - to_ask) / _OPERATIONS_PER_BATCH

    return session.sampling.of_batches(batch)


def after_start(session: Session) -> Sample:
    """Measures the mean resident memory of the two workers."""
    sizes = [targets.resident(), session.rpc.rpc_sync(PEER, targets.resident)]
    return Sample(sum(sizes) / len(sizes), max(sizes), 1)


def after_calls(session: Session, count: int) -> Sample:
    """Measures it after ``count`` empty calls, at most 100 of them in flight."""
    count = session.sampling.scaled(count)
    for start in range(0, count, _MAX_IN_FLIGHT):
        call_at_once(session, min(_MAX_IN_FLIGHT, count - start))
    return after_start(session)


def descriptors(session: Session) -> Sample:
    """Counts the open descriptors of worker 0."""
    return _entries_of("/proc/self/fd")


def threads(session: Session) -> Sample:
    """Counts the threads of worker 0, those of ZeroMQ included."""
    return _entries_of("/proc/self/task")


def _entries_of(directory: str) -> Sample:
    return Sample.single(len(os.listdir(directory)))


def private_memory(session: Session) -> Sample:
    """Measures the memory that worker 0 shares with no other process, in bytes."""
    return Sample.single(read_kib("/proc/self/smaps_rollup", "Private_Clean", "Private_Dirty"))

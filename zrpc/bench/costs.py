"""Workloads: what calls and steps cost whatever else the machine does.

The time of a call depends on how soon a busy machine wakes a thread. These numbers hardly do. Each
is for both workers together.
"""

from __future__ import annotations

from collections.abc import Callable

from zrpc.bench import targets
from zrpc.bench.autograd import training_step
from zrpc.bench.sampling import Sample
from zrpc.bench.session import PEER, Session

_OPERATIONS_PER_BATCH = 50
# A question to the peer about its count is itself a message, and so is the answer.
_MESSAGES_TO_ASK = 2


def processor_time(session: Session, width: int) -> Sample:
    """Measures the processor time, in seconds, of a step of this width; of an empty call if 0."""
    return _measure(session, width, targets.processor_time)


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

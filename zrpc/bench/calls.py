"""Workloads: calls."""

from __future__ import annotations

import threading
import time

import torch

from zrpc.bench import targets
from zrpc.bench.effort import Sample
from zrpc.bench.session import PEER, Session

__all__ = [
    "empty",
    "nested",
    "peer_busy",
    "pipelined",
    "small_tensor",
    "threads",
    "torch_operator",
]

_BATCH = 1000


def empty(session: Session) -> Sample:
    """A call of a function that does nothing."""
    rpc_sync = session.rpc.rpc_sync
    return session.effort.time(lambda: rpc_sync(PEER, targets.nothing))


def small_tensor(session: Session) -> Sample:
    """Two tensors of two elements go there, one comes back, by way of a Python function."""
    return _two_operands(session, targets.add)


def torch_operator(session: Session) -> Sample:
    """The same with an operator of torch itself."""
    return _two_operands(session, torch.add)


def _two_operands(session: Session, function: object) -> Sample:
    rpc_sync = session.rpc.rpc_sync
    operands = (torch.ones(2), torch.full((2,), 2.0))
    check("the sum", rpc_sync(PEER, function, args=operands).tolist(), [3.0, 3.0])
    return session.effort.time(lambda: rpc_sync(PEER, function, args=operands))


def nested(session: Session, hops: int) -> Sample:
    """A call whose handler calls back, whose handler calls again, ``hops`` calls deep."""
    rpc_sync = session.rpc.rpc_sync

    def once() -> int:
        depth: int = rpc_sync(PEER, targets.hop, args=(1, hops - 1))
        return depth

    check("the number of calls", once(), hops)
    return session.effort.time(once)


def pipelined(session: Session) -> Sample:
    """Many empty calls are under way at once, from one thread."""
    rpc_async = session.rpc.rpc_async
    count = session.effort.scaled(_BATCH)

    def batch() -> None:
        for future in [rpc_async(PEER, targets.nothing) for _ in range(count)]:
            future.wait()

    return session.effort.rate(batch, count)


def threads(session: Session, number: int) -> Sample:
    """Some threads make empty calls, each waiting for its own."""
    rpc_sync = session.rpc.rpc_sync
    each = session.effort.scaled(_BATCH // number)

    def calls() -> None:
        for _ in range(each):
            rpc_sync(PEER, targets.nothing)

    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            calls()
        except BaseException as error:
            failures.append(error)

    def batch() -> None:
        callers = [threading.Thread(target=guarded) for _ in range(number)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        if failures:
            raise failures[0]

    return session.effort.rate(batch, each * number)


def peer_busy(session: Session) -> Sample:
    """An empty call while another handler of the peer keeps its interpreter busy."""
    rpc_sync = session.rpc.rpc_sync
    burner = session.rpc.rpc_async(PEER, targets.burn)
    while not rpc_sync(PEER, targets.burning):
        time.sleep(0.001)
    try:
        sample = session.effort.time(lambda: rpc_sync(PEER, targets.nothing))
        check("whether the peer was still busy", rpc_sync(PEER, targets.burning), True)
    finally:
        rpc_sync(PEER, targets.stop_burning)
        burner.wait()
    return sample


def check(what: str, found: object, expected: object) -> None:
    """Refuses to measure what does not work.

    Raises:
        RuntimeError: what was found is not what was expected.
    """
    if found != expected:
        raise RuntimeError(f"expected {what} to be {expected!r}, but found {found!r}")

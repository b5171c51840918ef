"""Workloads: calls of functions."""

from __future__ import annotations

import itertools
import tempfile
import threading
import time
from typing import Any

import torch

from zrpc.bench import targets
from zrpc.bench.session import PEER, Sample, Session

_CALLS_PER_BATCH = 1000


def empty(session: Session) -> Sample:
    """Calls a function that does nothing."""
    rpc_sync = session.rpc.rpc_sync
    return session.sampling.time(lambda: rpc_sync(PEER, targets.nothing))


def peer_and_own(session: Session) -> Sample:
    """Calls a function that does nothing on the peer, then on this worker itself."""
    rpc_sync = session.rpc.rpc_sync
    return session.sampling.time(
        lambda: [rpc_sync(to, targets.nothing) for to in (PEER, "worker0")]
    )


def recorded(session: Session) -> Sample:
    """Calls a function that does nothing, while calls are recorded for people to look at."""
    with tempfile.TemporaryDirectory() as directory:
        recording: Any = (
            session.rpc.trace(f"{directory}/trace.json")
            if session.participant == "zrpc"
            else torch.autograd.profiler.profile()
        )
        with recording:
            return empty(session)


def small_tensor(session: Session) -> Sample:
    """Sends two tensors of two elements to a Python function that returns their sum."""
    return _two_operands(session, targets.add)


def torch_operator(session: Session) -> Sample:
    """Sends two tensors of two elements to an operator of torch."""
    return _two_operands(session, torch.add)


def _two_operands(session: Session, function: object) -> Sample:
    rpc_sync = session.rpc.rpc_sync
    operands = (torch.ones(2), torch.full((2,), 2.0))
    check("the sum", rpc_sync(PEER, function, args=operands).tolist(), [3.0, 3.0])
    return session.sampling.time(lambda: rpc_sync(PEER, function, args=operands))


def nested(session: Session, hops: int) -> Sample:
    """Makes a call whose handler calls back, and so on, ``hops`` calls deep."""
    rpc_sync = session.rpc.rpc_sync

    def once() -> int:
        depth: int = rpc_sync(PEER, targets.hop, args=(1, hops - 1))
        return depth

    check("the number of calls", once(), hops)
    return session.sampling.time(once)


def pipelined(session: Session) -> Sample:
    """Makes many empty calls from one thread before it waits for them."""
    count = session.sampling.scaled(_CALLS_PER_BATCH)
    return session.sampling.rate(lambda: call_at_once(session, count), count)


def in_flight(session: Session, count: int) -> Sample:
    """Makes ``count`` empty calls before it waits for them; the time of each."""
    return session.sampling.time(lambda: call_at_once(session, count)).divided(count)


def call_at_once(session: Session, count: int) -> None:
    """Makes ``count`` empty calls, then waits for them."""
    for future in [session.rpc.rpc_async(PEER, targets.nothing) for _ in range(count)]:
        future.wait()


def threads(session: Session, number: int) -> Sample:
    """Makes empty calls from several threads; each waits for its own."""
    rpc_sync = session.rpc.rpc_sync
    each = session.sampling.scaled(_CALLS_PER_BATCH // number)

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

    return session.sampling.rate(batch, each * number)


def peer_busy(session: Session) -> Sample:
    """Makes empty calls while another handler keeps the peer's interpreter busy."""
    rpc_sync = session.rpc.rpc_sync
    burner = session.rpc.rpc_async(PEER, targets.burn)
    while not rpc_sync(PEER, targets.burning):
        time.sleep(0.001)
    try:
        sample = session.sampling.time(lambda: rpc_sync(PEER, targets.nothing))
        check("whether the peer was still busy", rpc_sync(PEER, targets.burning), True)
    finally:
        rpc_sync(PEER, targets.stop_burning)
        burner.wait()
    return sample


def each_peer(session: Session) -> Sample:
    """Makes empty calls to all other workers in rotation."""
    rpc_sync = session.rpc.rpc_sync
    for peer in session.others:
        rpc_sync(peer, targets.nothing)  # connects
    turn = itertools.cycle(session.others)
    return session.sampling.time(lambda: rpc_sync(next(turn), targets.nothing))


def check(what: str, found: object, expected: object) -> None:
    """Refuses to measure a workload that gives a wrong result.

    Raises:
        RuntimeError: ``found`` differs from ``expected``.
    """
    if found != expected:
        raise RuntimeError(f"expected {what} to be {expected!r}, but found {found!r}")

"""Calls of finalizers that the garbage collector runs in the midst of zrpc's own code.

``gc.collect`` takes the place of the object that is one too many. It is a function of C: the
collector sees the frame of zrpc that calls it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest

import zrpc
from tests.support.waiting import SOON
from zrpc.agent.agent import Agent
from zrpc.testing import Mesh

Interrupt = Callable[[Agent], None]


released = threading.Event()  # by the call of a finalizer


def release() -> str:
    released.set()
    return "released"


def wait_cancelled() -> None:
    assert zrpc.current_call().wait_cancelled(SOON)
    released.set()


class Handle:
    """Something on another worker, in a cycle with its owner; its finalizer calls that worker."""

    def __init__(self, finalize: Callable[[], object]) -> None:
        self.finalize, self.me = finalize, self

    def __del__(self) -> None:
        self.finalize()


def in_a_turn(agent: Agent) -> None:
    """Collects in the thread that receives."""
    agent.receiver.in_io_thread(gc.collect)


class Collects:
    """A value that runs the collector when it is unpickled."""

    def __reduce__(self) -> Any:
        return gc.collect, ()


def in_a_result(agent: Agent) -> None:
    """Collects while zrpc reads the answer to a call of this thread."""
    zrpc.rpc_sync("worker1", Collects)


interrupts = pytest.mark.parametrize("interrupt", [in_a_turn, in_a_result])


@pytest.fixture(autouse=True)
def collect_before() -> None:
    released.clear()
    gc.collect()


def finalized(mesh: Mesh, interrupt: Interrupt, act: Callable[[], Any]) -> Any:
    """Returns the value of what a finalizer does with worker0's agent, or zrpc's error."""
    outcomes: queue.SimpleQueue[Any] = queue.SimpleQueue()
    agent = mesh.agent(0)

    def finalize() -> None:
        with agent.as_current():
            try:
                outcomes.put(act())
            except zrpc.RpcError as error:
                outcomes.put(error)

    def run() -> Any:
        Handle(finalize)
        interrupt(agent)
        return outcomes.get(timeout=SOON)

    return mesh.run(0, run)


@interrupts
def test_a_finalizer_calls_without_a_wait(mesh: Mesh, interrupt: Interrupt) -> None:
    future = finalized(mesh, interrupt, lambda: zrpc.rpc_async("worker1", release))
    assert future.wait() == "released"
    released.clear()
    error = finalized(mesh, interrupt, lambda: zrpc.rpc_sync("worker1", release, timeout=0))
    assert "finalizer" in str(error)
    assert released.wait(SOON)  # the call is made nevertheless


@interrupts
def test_a_finalizer_makes_no_rref_under_a_lock(mesh: Mesh, interrupt: Interrupt) -> None:
    for make in (lambda: zrpc.remote("worker1", release), lambda: zrpc.RRef(1)):
        assert "finalizer" in str(finalized(mesh, interrupt, make))


@interrupts
def test_a_finalizer_cancels_a_call(mesh: Mesh, interrupt: Interrupt) -> None:
    cancelled: list[bool] = []

    def run() -> None:
        agent = mesh.agent(0)
        future = zrpc.rpc_async("worker1", wait_cancelled)
        Handle(lambda: cancelled.append(future.cancel()))
        interrupt(agent)
        with pytest.raises(zrpc.RpcCancelledError):
            future.wait()

    mesh.run(0, run)
    assert cancelled == [True]
    assert released.wait(SOON)


def call_while_the_collector_runs(make: Callable[[], Any]) -> list[str]:
    """Calls worker0 while each new object starts the collector, which finds one more finalizer.

    A handler's first call to a peer makes an object under the lock of the table of calls. The end
    of an RRef makes messages, which are named tuples, under the lock of the references.
    """
    made: list[Any] = []

    def finalize() -> None:
        # In a thread of either worker. To set a context variable here, as `as_current` does, can
        # crash Python if it interrupts the same in C.
        with contextlib.suppress(zrpc.RpcError):  # between two jobs of a thread, say
            made.append(make())
        if gc.get_threshold()[0] == 1 and len(made) < 200:
            Handle(finalize)

    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        Handle(finalize)
        zrpc.rpc_sync("worker0", release)
        for _ in range(3):
            zrpc.remote("worker0", release).to_here()
    finally:
        gc.set_threshold(*thresholds)
    return [each.to_here() if isinstance(each, zrpc.RRef) else each.wait() for each in made]


def test_a_finalizer_acts_wherever_the_collector_interrupts(mesh: Mesh) -> None:
    """It holds up no worker. An RRef is not made everywhere."""
    call = functools.partial(zrpc.rpc_async, "worker0", release)
    make = functools.partial(zrpc.RRef, "released")
    for act, least in ((call, 20), (make, 0)):
        values = mesh.run(0, zrpc.rpc_sync, "worker1", call_while_the_collector_runs, (act,))
        assert len(values) > least
        assert set(values) == {"released"}


def test_a_finalizer_waits_where_the_program_itself_is_interrupted(mesh: Mesh) -> None:
    call = functools.partial(zrpc.rpc_sync, "worker1", release)
    assert finalized(mesh, lambda _: gc.collect(), call) == "released"


def test_the_error_of_a_finalizers_call_is_that_of_its_future(mesh: Mesh) -> None:
    def fail() -> list[zrpc.Future[Any]]:
        return [zrpc.rpc_async("worker1", divmod, args=(1, n)) for n in (0, threading.Lock())]

    fails, unpicklable = finalized(mesh, in_a_turn, fail)
    with pytest.raises(ZeroDivisionError):
        fails.wait()
    with pytest.raises(zrpc.SerializationError):
        unpicklable.wait()


def test_a_graceful_shutdown_in_a_finalizer_raises_in_the_thread_that_receives(mesh: Mesh) -> None:
    assert "finalizer" in str(finalized(mesh, in_a_turn, mesh.agent(0).shutdown))

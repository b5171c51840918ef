"""Calls of finalizers that the garbage collector runs in the midst of zrpc's own code.

``gc.collect`` takes the place of the object that is one too many. It is a function of C: the
collector sees the frame of zrpc that calls it.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

import zrpc
from tests.support.waiting import SOON
from zrpc.agent.agent import Agent
from zrpc.testing import Mesh

Interrupt = Callable[[Agent], None]


class Released:
    """Counts the calls of finalizers."""

    event = threading.Event()


def release() -> str:
    Released.event.set()
    return "released"


def wait_cancelled() -> None:
    assert zrpc.current_call().wait_cancelled(SOON)
    Released.event.set()


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
    """A value that collects where it is unpickled."""

    def __reduce__(self) -> Any:
        return gc.collect, ()


def in_a_result(agent: Agent) -> None:
    """Collects while zrpc reads the answer to a call of this thread."""
    zrpc.rpc_sync("worker1", Collects)


@pytest.fixture(autouse=True)
def collect_before() -> None:
    Released.event.clear()
    gc.collect()


@pytest.mark.parametrize("interrupt", [in_a_turn, in_a_result])
def test_a_call_of_a_finalizer_is_made_wherever_the_collector_runs_it(
    mesh: Mesh, interrupt: Interrupt
) -> None:
    futures: list[Any] = []

    def run() -> str:
        agent = mesh.agent(0)

        def finalize() -> None:
            with agent.as_current():
                futures.append(zrpc.rpc_async("worker1", release))

        Handle(finalize)
        interrupt(agent)
        assert Released.event.wait(SOON)
        return str(futures[0].wait())

    assert mesh.run(0, run) == "released"


@pytest.mark.parametrize("interrupt", [in_a_turn, in_a_result])
def test_a_finalizer_does_not_wait_where_it_would_wait_for_its_own_thread(
    mesh: Mesh, interrupt: Interrupt
) -> None:
    """Its call is made nevertheless."""
    errors: list[Exception] = []

    def run() -> None:
        agent = mesh.agent(0)

        def finalize() -> None:
            with agent.as_current():
                try:
                    zrpc.rpc_sync("worker1", release, timeout=0)
                except zrpc.RpcError as error:
                    errors.append(error)

        Handle(finalize)
        interrupt(agent)
        assert Released.event.wait(SOON)

    mesh.run(0, run)
    assert "finalizer" in str(errors[0])


@pytest.mark.parametrize("interrupt", [in_a_turn, in_a_result])
def test_a_finalizer_cancels_a_call_wherever_the_collector_runs_it(
    mesh: Mesh, interrupt: Interrupt
) -> None:
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
    assert Released.event.wait(SOON)


def test_a_finalizer_waits_where_the_program_itself_is_interrupted(mesh: Mesh) -> None:
    values: list[Any] = []

    def run() -> None:
        Handle(lambda: values.append(zrpc.rpc_sync("worker1", release)))
        gc.collect()

    mesh.run(0, run)
    assert values == ["released"]


def test_the_error_of_a_finalizers_call_is_that_of_its_future(mesh: Mesh) -> None:
    futures: list[Any] = []

    def run() -> None:
        agent, made = mesh.agent(0), threading.Event()

        def finalize() -> None:
            with agent.as_current():
                futures.append(zrpc.rpc_async("worker1", divmod, args=(1, 0)))
                unpicklable = threading.Lock()
                futures.append(zrpc.rpc_async("worker1", divmod, args=(1, unpicklable)))
            made.set()

        Handle(finalize)
        in_a_turn(agent)
        assert made.wait(SOON)
        with pytest.raises(ZeroDivisionError):
            futures[0].wait()
        with pytest.raises(zrpc.SerializationError):
            futures[1].wait()

    mesh.run(0, run)


def test_a_graceful_shutdown_in_a_finalizer_raises_in_the_thread_that_receives(mesh: Mesh) -> None:
    errors: list[Exception] = []

    def run() -> None:
        agent, tried = mesh.agent(0), threading.Event()

        def finalize() -> None:
            try:
                agent.shutdown()
            except zrpc.RpcError as error:
                errors.append(error)
            tried.set()

        Handle(finalize)
        in_a_turn(agent)
        assert tried.wait(SOON)

    mesh.run(0, run)
    assert "finalizer" in str(errors[0])

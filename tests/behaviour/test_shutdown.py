"""The end of a mesh: graceful, at once, and after a death."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest
import torch

import zrpc as rpc
from tests.support.gates import Gate
from tests.support.steps import at_step
from tests.support.targets import echo
from tests.support.threads import start_all
from tests.support.waiting import SOON, pending, until
from zrpc.agent.agent import Agent
from zrpc.functions import async_execution
from zrpc.testing import Mesh

MakeMesh = Callable[..., Mesh]


def end(mesh: Mesh, rank: int, **kwargs: Any) -> Future[None]:
    """Begins the shutdown of one worker, in the worker's own thread."""
    return mesh.submit(rank, rpc.shutdown, **kwargs)


# -- graceful --------------------------------------------------------------------------------


async def wait_then_call(gate: Gate) -> Any:
    await asyncio.to_thread(gate.wait_inside)
    return await rpc.rpc_async(0, echo, ("done",))


@async_execution
def wait_elsewhere(gate: Gate) -> Any:
    return rpc.rpc_async(0, gate.wait_inside, ("done",))


@pytest.mark.system
def test_it_waits_for_what_runs(mesh: Mesh, gate: Gate) -> None:
    with mesh.agent(0).as_current():
        futures = [rpc.rpc_async(1, gate.wait_inside, ("done",))]
        futures += [rpc.rpc_async(1, each, (gate,)) for each in (wait_then_call, wait_elsewhere)]
    gate.await_entry(3)
    ends = [end(mesh, rank) for rank in range(2)]
    assert pending(ends[0], 0.3)
    gate.open()
    for each in ends:
        each.result(SOON)
    assert [future.wait() for future in futures] == ["done"] * 3


_tally: list[int] = []


def fan_out(depth: int) -> None:
    """Calls that nobody waits for, each of which calls on."""
    _tally.append(depth)
    if depth:
        for to in range(3):
            rpc.rpc_async(to, fan_out, (depth - 1,))


@pytest.mark.system
@pytest.mark.zrpc(workers=3)
def test_it_waits_for_nested_calls_that_nobody_waits_for(mesh: Mesh) -> None:
    _tally.clear()
    mesh.run(0, rpc.rpc_async, 1, fan_out, (6,))
    mesh.run_all(rpc.shutdown)
    assert len(_tally) == sum(3**n for n in range(7))


_parked: list[torch.futures.Future[Any]] = []


@async_execution
def park() -> Any:
    _parked.append(torch.futures.Future())
    _entered.release()
    return _parked[-1]


_entered = threading.Semaphore(0)


@pytest.mark.system
def test_it_does_not_wait_for_a_future_that_nobody_waits_for(mesh: Mesh) -> None:
    """As of the batch that a parameter server never fills."""
    with mesh.agent(0).as_current():
        rref = rpc.remote(1, park, timeout=0.2)
        late, cancelled = rpc.rpc_async(1, park, timeout=0.2), rpc.rpc_async(1, park)
        for _ in range(3):
            assert _entered.acquire(timeout=SOON)
        assert cancelled.cancel()
        for wait in (partial(rref.to_here, 0.3), late.wait, cancelled.wait):
            with pytest.raises(rpc.RpcError):
                wait()
    for each in [end(mesh, rank) for rank in range(2)]:
        each.result(SOON)
    while _parked:
        _parked.pop().set_result("too late")


def test_right_after_the_start(make_mesh: MakeMesh) -> None:
    for workers in (1, 2, 5):
        make_mesh(workers=workers).run_all(rpc.shutdown, timeout=SOON)


def test_again_and_from_several_threads_at_once(mesh: Mesh) -> None:
    agents = [mesh.agent(rank) for rank in (0, 1)]
    assert start_all([agent.shutdown for agent in agents * 3], SOON)() == [None] * 6
    with agents[0].as_current():
        for use in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
            with pytest.raises(RuntimeError, match=r"^RPC has not been initialized"):
                use("worker1", echo, (1,))
        assert not rpc.is_initialized()
        for graceful in (True, False):
            rpc.shutdown(graceful=graceful)


def call(agent: Agent) -> None:
    with agent.as_current():
        assert rpc.rpc_sync(1, echo, (1,), timeout=0) == 1


@pytest.mark.system
@pytest.mark.parametrize("begin", [call, Agent.shutdown], ids=["a call", "a shutdown"])
def test_what_begins_as_the_agent_closes_ends(
    make_mesh: MakeMesh, begin: Callable[[Agent], None]
) -> None:
    """At whichever step of it the agent is closed."""

    def run(number: int) -> None:
        mesh = make_mesh(workers=2)
        agent, closing = mesh.agent(0), []

        def close() -> None:
            closing.append(threading.Thread(target=agent.close))
            closing[0].start()
            closing[0].join(0.05)  # it may wait for this thread

        with at_step(number, close), contextlib.suppress(rpc.NotInitializedError):
            begin(agent)
        agent.close()
        for thread in closing:
            thread.join(SOON)
        mesh.shutdown(graceful=False)

    for number in range(1, 60, 3):
        run(number)


@pytest.mark.system
def test_a_timeout_names_the_workers_that_still_serve_calls(mesh: Mesh) -> None:
    agent = mesh.agent(0)
    with Gate() as gate:
        with agent.as_current():
            call = rpc.rpc_async(1, gate.wait_inside)
        gate.await_entry()
        assert call.cancel()  # its handler goes on
        last = end(mesh, 1)
        shutdown = agent.graceful_shutdown
        until(lambda: shutdown.phase)  # worker1 has joined it
        with pytest.raises(rpc.RpcTimeoutError, match=r"in progress on ranks \[1\]"):
            end(mesh, 0, timeout=1).result(SOON)
    last.result(SOON)


@pytest.mark.system
def test_with_a_timeout(mesh: Mesh) -> None:
    begin = time.monotonic()
    with pytest.raises(rpc.RpcTimeoutError, match=r"ranks \[1\] have not begun to shut down"):
        end(mesh, 0, timeout=0.3).result(SOON)
    assert time.monotonic() - begin >= 0.3  # and it has left
    with mesh.agent(1).as_current(), pytest.raises(rpc.WorkerDied):
        rpc.rpc_sync(0, echo, (1,), timeout=SOON)


async def shut_down_in_a_coroutine() -> None:
    rpc.shutdown()


@pytest.mark.zrpc(timeout=20)
def test_a_graceful_one_from_a_handler_is_refused(caller: Mesh) -> None:
    for handler in (rpc.shutdown, shut_down_in_a_coroutine):
        with pytest.raises(rpc.RpcError, match=r"waits for all handlers"):
            rpc.rpc_sync(1, handler, timeout=5)
    assert rpc.rpc_sync(1, echo, (1,)) == 1


# -- at once ---------------------------------------------------------------------------------


@pytest.mark.system
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_not_graceful_is_at_once_and_local(make_mesh: MakeMesh, transport: str, gate: Gate) -> None:
    mesh = make_mesh(workers=3, options={"transport": transport})
    with mesh.agent(1).as_current():
        of_its_own = rpc.rpc_async(0, gate.wait_inside)
    with mesh.agent(0).as_current():
        pending = rpc.rpc_async(1, gate.wait_inside)
        rref = rpc.remote(1, gate.wait_inside)
        gate.await_entry(3)
        leaving = end(mesh, 1, graceful=False)
        with pytest.raises(rpc.RpcError):
            of_its_own.wait()
        for use in (pending.wait, rref.to_here, partial(rpc.rpc_sync, 1, echo)):
            with pytest.raises(rpc.WorkerDied, match="worker1") as info:
                use()
            assert isinstance(info.value, ConnectionError)
        assert rpc.rpc_sync(2, echo, (1,)) == 1  # the rest goes on
    gate.open()
    leaving.result(SOON)

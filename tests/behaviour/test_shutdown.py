"""The end of a mesh: graceful, at once, and after a death. It is bounded in every state."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import zrpc as rpc
from tests.support.agents import join_all
from tests.support.gates import Gate
from tests.support.observed import ask_often
from tests.support.targets import echo
from tests.support.threads import start_all
from tests.support.waiting import SOON, pending, until
from zrpc.agent.peers import LeaveMessage
from zrpc.agent.service import Service
from zrpc.agent.shutdown import ShutdownTiming
from zrpc.functions import async_execution
from zrpc.services.rref.service import RRefService
from zrpc.testing import Mesh, faults
from zrpc.wire.kind import Kind
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message

pytestmark = pytest.mark.system  # all but a few wait for a time-out or start processes

MakeMesh = Callable[..., Mesh]


def end(mesh: Mesh, rank: int, **kwargs: Any) -> Future[None]:
    """Begins the shutdown of one worker, in the worker's own thread."""
    return mesh.submit(rank, rpc.shutdown, **kwargs)


def shut_down(mesh: Mesh, *ranks: int) -> None:
    """Shuts down some workers, or all, with no time-out."""
    for each in [end(mesh, rank) for rank in ranks or range(len(mesh))]:
        each.result(SOON)


# -- graceful --------------------------------------------------------------------------------


async def wait_then_call(gate: Gate) -> Any:
    await asyncio.to_thread(gate.wait_inside)
    return await rpc.rpc_async(0, echo, ("done",))


@async_execution
def wait_elsewhere(gate: Gate) -> Any:
    return rpc.rpc_async(0, gate.wait_inside, ("done",))


def test_it_waits_for_what_runs(caller: Mesh, gate: Gate) -> None:
    futures = [rpc.rpc_async(1, gate.wait_inside, ("done",))]
    futures += [rpc.rpc_async(1, each, (gate,)) for each in (wait_then_call, wait_elsewhere)]
    gate.await_entry(3)
    ends = [end(caller, rank) for rank in range(2)]
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


@pytest.mark.zrpc(workers=3)
def test_it_waits_for_nested_calls_that_nobody_waits_for(mesh: Mesh) -> None:
    _tally.clear()
    mesh.run(0, rpc.rpc_async, 1, fan_out, (6,))
    mesh.run_all(rpc.shutdown)
    assert len(_tally) == sum(3**n for n in range(7))


@async_execution
def park(gate: Gate) -> Any:
    gate.entered.release()
    return torch.futures.Future()


def test_it_does_not_wait_for_a_future_that_nobody_waits_for(caller: Mesh, gate: Gate) -> None:
    """As of the batch that a parameter server never fills."""
    rref = rpc.remote(1, park, (gate,), timeout=1)
    late = rpc.rpc_async(1, park, (gate,), timeout=1)
    cancelled = rpc.rpc_async(1, park, (gate,))
    gate.await_entry(3)
    assert cancelled.cancel()
    for wait in (partial(rref.to_here, 0.3), late.wait, cancelled.wait):
        with pytest.raises(rpc.RpcError):
            wait()
    caller.shutdown()


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


def test_a_timeout_names_the_workers_that_still_serve_calls(caller: Mesh, gate: Gate) -> None:
    call = rpc.rpc_async(1, gate.wait_inside)
    gate.await_entry()
    assert call.cancel()  # its handler goes on
    last = end(caller, 1)
    until(lambda: caller.agent(0).graceful_shutdown.phase)  # worker1 has joined it
    with pytest.raises(rpc.RpcTimeoutError, match=r"in progress on ranks \[1\]"):
        end(caller, 0, timeout=1).result(SOON)
    gate.open()
    last.result(SOON)


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


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_not_graceful_is_at_once_and_local(make_mesh: MakeMesh, transport: str, gate: Gate) -> None:
    mesh = make_mesh(workers=3, options={"transport": transport})
    of_its_own = mesh.run(1, rpc.rpc_async, 0, gate.wait_inside)
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


def until_lost(name: str) -> None:
    """Waits until this worker has declared another one lost, or was told to."""

    gone = threading.Event()
    rpc.on_worker_lost(lambda worker: worker.name == name and gone.set())
    assert gone.wait(20), f"{name} is not lost"


# -- with peers that are gone, or answer no more ------------------------------------------------


@pytest.mark.zrpc(workers=3, processes=True, timeout=40, options={"heartbeat_timeout": 1.0})
def test_a_peer_that_is_stopped_and_was_never_talked_to(mesh: Mesh) -> None:
    with faults.pause(mesh, 2):
        shut_down(mesh, 0, 1)
    mesh.kill(2)


@pytest.mark.zrpc(workers=3)
def test_the_lowest_rank_leaves_at_once_which_another_has_told_already(mesh: Mesh) -> None:
    begun = end(mesh, 2)
    mesh.run(0, rpc.shutdown, graceful=False)
    shut_down(mesh, 1)
    begun.result(SOON)


@pytest.mark.zrpc(workers=3, faults=True, options={"heartbeat_timeout": 1.0})
def test_a_network_that_is_cut_during_the_shutdown(mesh: Mesh) -> None:
    first = mesh.submit(2, rpc.shutdown)  # it has told worker0 already
    mesh.run(0, rpc.rpc_sync, 2, echo, (1,))
    with faults.cut(mesh, 0, 2), faults.cut(mesh, 1, 2):
        shut_down(mesh, 0, 1)
        first.result(SOON)


@pytest.mark.zrpc(workers=3, processes=True, timeout=60, options={"heartbeat_timeout": 2.0})
def test_one_that_was_stopped_and_is_told_that_it_was_declared_dead(mesh: Mesh) -> None:
    """The two no longer count each other; the third one learns of that, and puts out one."""
    assert mesh.run(0, rpc.rpc_sync, 1, echo, (1,)) == 1
    assert mesh.run(1, rpc.rpc_sync, 0, echo, (1,)) == 1
    lost = mesh.submit(1, until_lost, "worker0")
    with faults.pause(mesh, 0):
        lost.result(SOON)
    # It learns that without having sent anything.
    mesh.run(0, until_lost, "worker1")
    shut_down(mesh, 0, 2)
    with pytest.raises(rpc.WorkerDied, match="this worker was put out of the mesh"):
        mesh.run(1, rpc.rpc_sync, 2, echo, (1,))
    mesh.run(1, rpc.shutdown)


# -- with a handler that never returns ------------------------------------------------------------


def test_a_handler_that_never_returns_and_a_timeout(caller: Mesh, gate: Gate) -> None:
    pending = rpc.rpc_async(1, gate.wait_inside)
    gate.await_entry()
    ends = [caller.submit(rank, rpc.shutdown, timeout=0.3) for rank in (0, 1)]
    with pytest.raises(rpc.RpcTimeoutError, match=r"still running here: 1"):
        ends[1].result(SOON)
    with pytest.raises(rpc.RpcTimeoutError):
        ends[0].result(SOON)
    with pytest.raises(rpc.RpcError):
        pending.wait()
    gate.open()


# -- from where user code runs ----------------------------------------------------------------


def test_from_a_hook(mesh: Mesh) -> None:
    """Not gracefully: that would wait for the hook."""

    def leave(worker: rpc.WorkerInfo) -> None:
        with pytest.raises(rpc.RpcError, match="waits for all handlers"):
            rpc.shutdown()
        rpc.shutdown(graceful=False)

    mesh.run(0, rpc.on_worker_lost, leave)
    mesh.run(1, rpc.shutdown, graceful=False)
    until(lambda: mesh.agent(0).closed)


def test_from_a_handler_while_another_thread_waits_for_the_others(caller: Mesh) -> None:
    """A worker that leaves all the same no longer waits for them."""
    waiting = caller.submit(1, rpc.shutdown)
    assert pending(waiting, 0.2)
    with pytest.raises(rpc.RpcError):
        rpc.rpc_sync(1, rpc.shutdown, kwargs={"graceful": False}, timeout=SOON)
    waiting.result(SOON)


def test_from_a_callback(caller: Mesh) -> None:
    rpc.rpc_async(1, echo).then(lambda _: rpc.shutdown(graceful=False)).wait()
    assert caller.agent(0).closed


# -- with a part of it that fails ----------------------------------------------------------------


class FailsAtTheEnd(Service):
    def close(self) -> None:
        raise self.agent.options.error


@pytest.mark.usefixtures("no_leaks")
def test_the_rest_is_done_if_a_service_fails() -> None:
    """Whatever it raises."""
    for error in (ValueError("a defect"), KeyboardInterrupt()):
        options = rpc.ZmqRpcBackendOptions()
        options.error = error  # type: ignore[attr-defined]
        [agent] = join_all(("alone", 0, 1), options=options, services=[FailsAtTheEnd])
        with pytest.raises(type(error)) as info:
            agent.shutdown(graceful=False)
        assert info.value is error
        info.value.__traceback__ = None
        assert not Path(agent.membership.records[0].directory).exists()


class SpeaksAtTheEnd(Service):
    """Sends the other worker a message as its agent closes, and notes whether it was sent."""

    def close(self) -> None:
        network, other = self.agent.network, MemberId(1 - self.agent.worker_info.id)
        before = network.sent([other])
        self.agent.outbox.post(other, Message(Kind.REFERENCE))
        _sent.append(network.sent([other]) - before)


_sent: list[int] = []


@pytest.mark.usefixtures("no_leaks")
def test_nothing_is_sent_once_all_have_left_gracefully() -> None:
    """As a reference that is freed then: the end would wait in vain until that has arrived."""
    for graceful, sent in ((False, [1]), (True, [0, 0])):
        agents = join_all(("one", 0, 2), ("other", 1, 2), services=[SpeaksAtTheEnd])
        with agents[0].as_current():
            assert rpc.rpc_sync("other", echo, (1,)) == 1
        _sent.clear()
        leaving = [partial(agent.shutdown, graceful) for agent in agents]
        start_all(leaving if graceful else leaving[:1], SOON)()
        assert _sent == sent
        for agent in agents:
            agent.close()


class CountsTicks(Service):
    """Counts the ticks of its worker's I/O thread."""

    ticks = 0

    def tick(self) -> None:
        self.ticks += 1


@pytest.mark.usefixtures("no_leaks")
def test_a_worker_that_leaves_is_not_told_that_it_is_dead_as_it_asks_for_heartbeats() -> None:
    """As one that is still about to leave: it would report the loss of all others."""
    agents = join_all(("one", 0, 2), ("other", 1, 2), services=[CountsTicks])
    one, (own, other) = agents[0], (agent.worker_info.member_id for agent in agents)
    one.outbox.post(other, LeaveMessage().pack())
    until(lambda: own in agents[1].membership.lost and one.liveness.silence(other) == 0.0)
    # Its first message on that connection leaves at the next tick; an answer is read at another.
    counter = one.service(CountsTicks)
    seen = counter.ticks
    until(lambda: counter.ticks > seen + 3)
    assert not one.membership.lost
    for agent in agents:
        agent.close()


# -- while messages are lost, as by a connection that breaks -------------------------------------


LOSING = pytest.mark.zrpc(workers=3, faults=True)


@pytest.fixture
def losing(mesh: Mesh) -> Mesh:
    """Its workers soon ask for what is lost."""
    ask_often(mesh)
    for rank in range(3):
        timing = ShutdownTiming(remind=0.05, services=0.3)
        mesh.agent(rank).graceful_shutdown.timing = timing
        assert mesh.run(rank, rpc.rpc_sync, (rank + 1) % 3, echo, (1,)) == 1
    return mesh


@LOSING
def test_messages_of_the_shutdown_are_lost(losing: Mesh) -> None:
    with faults.drop(losing, 0, 1, count=2) as one, faults.drop(losing, 1, 0, count=1) as other:
        shut_down(losing)
        assert one.happened + other.happened >= 1


@LOSING
def test_a_call_without_a_timeout_is_lost(losing: Mesh) -> None:
    with faults.drop(losing, 0, 1) as fault:
        lost = losing.run(0, rpc.rpc_async, 1, echo, (1,), timeout=0)
        until(lambda: fault.happened)
    shut_down(losing)
    with pytest.raises(rpc.RpcError, match="is lost"):
        lost.wait()


@LOSING
def test_a_reference_is_lost(losing: Mesh) -> None:
    """Its sender waits for the word that it has arrived, which never comes."""
    with losing.agent(0).as_current():
        assert rpc.rpc_sync(2, echo, (1,)) == 1
        rref = rpc.remote(1, list)
        assert rref.to_here() == []
        with faults.drop(losing, 0, 2), pytest.raises(rpc.RpcError, match="is lost"):
            rpc.rpc_sync(2, echo, (rref,), timeout=0)
        assert not losing.agent(0).service(RRefService).idle()
    shut_down(losing)

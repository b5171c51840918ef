"""Calls that are cancelled, at the caller and at the callee."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from typing import Any

import pytest
import torch

import zrpc as rpc
from tests.support.gates import Gate
from tests.support.observed import busy, stats_of
from tests.support.targets import echo
from tests.support.waiting import SOON, until
from tests.support.watched import Keeper, Watched, call_until_it_begins, wait_for
from zrpc.testing import Mesh

# -- the future --------------------------------------------------------------------------------


def test_the_future_ends_at_once(shared: Mesh, watched: Watched) -> None:
    future = rpc.rpc_async(1, watched.watch)
    watched.await_entry()
    assert not future.cancelled()
    assert future.cancel()
    assert future.done()
    assert future.cancelled()
    for _ in range(2):
        with pytest.raises(rpc.RpcCancelledError, match="was cancelled"):
            future.wait()
    with pytest.raises(concurrent.futures.CancelledError):
        future.value()
    assert not future.cancel()
    assert watched.await_end() == [True]


def test_callbacks_see_an_error(shared: Mesh, watched: Watched) -> None:
    def see(future: Any) -> str:
        with pytest.raises(rpc.RpcCancelledError):
            future.wait()
        return "seen"

    future = rpc.rpc_async(1, watched.watch)
    watched.await_entry()
    then, failed = future.then(see), future.then(lambda f: f.wait())
    late = threading.Event()
    future.add_done_callback(lambda f: late.set())
    assert future.cancel()
    assert then.wait() == "seen"
    assert not then.cancelled()
    with pytest.raises(rpc.RpcCancelledError):
        failed.wait()
    assert late.wait(SOON)
    assert future.then(see).wait() == "seen"
    with pytest.raises(rpc.RpcCancelledError):
        torch.futures.wait_all([future])
    assert watched.await_end() == [True]


def test_a_future_of_then_cancels_the_call(shared: Mesh, watched: Watched) -> None:
    last = rpc.rpc_async(1, watched.watch).then(lambda f: f.wait()).then(lambda f: f.wait())
    assert last.cancel()
    with pytest.raises(rpc.RpcCancelledError):
        last.wait()
    assert not last.cancel()


def test_a_future_of_ones_own() -> None:
    future: rpc.Future[int] = rpc.Future()
    seen: list[bool] = []
    future.add_done_callback(lambda f: seen.append(f.cancelled()))
    assert future.cancel()
    assert future.cancelled()
    assert seen == [True]
    with pytest.raises(rpc.RpcCancelledError):
        future.wait()
    assert not future.cancel()
    done: rpc.Future[int] = rpc.Future()
    done.set_result(1)
    assert not done.cancel()
    assert not done.cancelled()


# -- the callee --------------------------------------------------------------------------------


@pytest.mark.zrpc(workers=2, options={"num_worker_threads": 1})
def test_one_that_waits_for_its_turn_never_runs(caller: Mesh, watched: Watched) -> None:
    with Gate() as gate:
        first = rpc.rpc_async(1, gate.work_inside, ("first",))
        gate.await_entry()
        futures = [rpc.rpc_async(1, watched.tell, (i,)) for i in range(6)]
        until(lambda: busy(caller) == 7)
        for future in futures[::2]:
            assert future.cancel()
        until(lambda: busy(caller) == 4 and stats_of(caller, 1).threads.queued == 3)
        gate.open()
        assert first.wait() == "first"
        torch.futures.wait_all(futures[1::2])
    assert sorted(watched.told) == [1, 3, 5]
    until(lambda: not stats_of(caller, 1).threads.running)


@pytest.mark.system
@pytest.mark.zrpc(workers=2, options={"num_worker_threads": 1})
def test_what_is_too_late_leaves_the_queue(caller: Mesh, watched: Watched) -> None:
    """While the handlers before it still run: it would pile up otherwise."""
    with Gate() as gate:
        rpc.rpc_async(1, gate.work_inside)
        gate.await_entry()
        for future in [rpc.rpc_async(1, watched.tell, (i,), timeout=0.1) for i in range(5)]:
            with pytest.raises(rpc.RpcTimeoutError):
                future.wait()
        until(lambda: busy(caller) == 1 and not stats_of(caller, 1).threads.queued)
    assert watched.told == []


def test_an_error_after_the_cancellation_is_logged(
    shared: Mesh, watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    """Since nobody else hears of it."""
    future = rpc.rpc_async(1, fail_when_cancelled, (watched,))
    watched.await_entry()
    future.cancel()
    until(lambda: not busy(shared))
    assert "the clean-up failed" in caplog.text


def fail_when_cancelled(watched: Watched) -> None:
    watched.watch()
    raise KeyError("the clean-up failed")


@pytest.mark.parametrize("owner", [0, 1])
@pytest.mark.parametrize(("name", "told"), [("watch", True), ("sleep", "cancelled")])
def test_a_method_of_an_rref(
    shared: Mesh, watched: Watched, owner: int, name: str, told: Any
) -> None:
    rref = rpc.remote(owner, Keeper, (watched,))
    future = getattr(rref.rpc_async(), name)()
    watched.await_entry()
    assert future.cancel()
    assert watched.await_end() == [told]


def test_a_method_of_a_value_that_is_still_to_come(shared: Mesh, watched: Watched) -> None:
    with Gate() as gate:
        rref = rpc.remote(1, make_keeper, (gate, watched))
        gate.await_entry()
        future = rref.rpc_async().watch()
        until(lambda: busy(shared) == 2)
        assert future.cancel()
        until(lambda: busy(shared) == 1)
        gate.open()
        assert rref.rpc_sync().__eq__(None) is NotImplemented  # it can be called
    until(lambda: not busy(shared))
    assert watched.told == []


def make_keeper(gate: Gate, watched: Watched) -> Keeper:
    gate.wait_inside()
    return Keeper(watched)


@pytest.mark.system
def test_remote_is_never_cancelled(shared: Mesh, watched: Watched) -> None:
    """Others than its creator may wait for the value."""
    rref = rpc.remote(1, never_cancelled, (watched,), timeout=0.05)
    assert watched.await_end() == [False]
    assert not hasattr(rref, "cancel")


def never_cancelled(watched: Watched) -> None:
    call = rpc.current_call()
    until(lambda: call.time_remaining() == 0)
    watched.tell(call.wait_cancelled(0.15))  # the I/O thread has looked at deadlines by then


# -- asyncio -----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["cancel", "wait_for"])
def test_a_task_that_is_cancelled_cancels_its_call(
    shared: Mesh, watched: Watched, way: str
) -> None:
    async def main() -> None:
        future = rpc.rpc_async(1, watched.watch)
        watched.await_entry()
        if way == "wait_for":
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(future, 0.01)
        else:
            task = asyncio.ensure_future(wait_for(future))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert future.cancelled()

    asyncio.run(main())
    assert watched.await_end() == [True]


def test_a_cancelled_future_does_not_cancel_the_task_that_awaits_it(
    shared: Mesh, watched: Watched
) -> None:
    async def main() -> None:
        future = rpc.rpc_async(1, watched.watch)
        watched.await_entry()
        asyncio.get_running_loop().call_later(0.01, future.cancel)
        with pytest.raises(rpc.RpcCancelledError):
            await future

    asyncio.run(main())
    assert watched.await_end() == [True]


def test_a_cancelled_task_leaves_a_future_of_ones_own_to_others() -> None:
    future: rpc.Future[int] = rpc.Future()

    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(future, 0.01)

    asyncio.run(main())
    assert not future.cancelled()
    future.set_result(5)
    assert future.wait() == 5


# -- deadlines ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "told"), [("watch", True), ("sleep", "cancelled")])
def test_a_timeout_of_the_caller_ends_the_handler(
    shared: Mesh, watched: Watched, caplog: pytest.LogCaptureFixture, name: str, told: Any
) -> None:
    call_until_it_begins(watched, getattr(watched, name))
    assert watched.await_end() == [told]
    watched.open()
    until(lambda: not busy(shared))
    assert caplog.records == []


def test_a_handler_that_looks_sees_the_deadline_at_once(shared: Mesh, watched: Watched) -> None:
    call_until_it_begins(watched, look, (watched,))
    assert watched.await_end() == [True]


def look(watched: Watched) -> None:
    call = rpc.current_call()
    watched.entered.release()
    remaining = call.time_remaining()
    assert remaining is not None
    time.sleep(remaining)
    watched.tell(call.cancelled)
    assert watched.opened.wait(SOON)  # so that the answer comes too late


# -- what may go wrong -------------------------------------------------------------------------


@pytest.mark.system
@pytest.mark.parametrize("to", [0, 1])
def test_cancellations_that_race_with_completion_do_no_harm(
    caller: Mesh, caplog: pytest.LogCaptureFixture, to: int
) -> None:
    """Each future either has its own value or is cancelled; the mesh ends gracefully."""
    took_effect = 0
    for i in range(400):
        future, other = rpc.rpc_async(to, echo, (i,)), rpc.rpc_async(to, echo, (-i,))
        if i % 3 == 0:
            time.sleep(0.0002)
        if future.cancel():
            took_effect += 1
            with pytest.raises(rpc.RpcCancelledError):
                future.wait()
        else:
            assert future.wait() == i
        assert other.wait() == -i
    assert took_effect
    assert caplog.records == []
    until(lambda: not busy(caller, to))


@pytest.mark.zrpc(workers=3)
def test_a_caller_that_leaves_is_waited_for_no_more(mesh: Mesh, watched: Watched) -> None:
    with mesh.agent(2).as_current():
        future = rpc.rpc_async(1, watched.watch)
        watched.await_entry()
        with mesh.agent(0).as_current():
            other = rpc.rpc_async(1, echo, (7,))
        mesh.agent(2).shutdown(graceful=False)
    assert watched.await_end() == [True]
    assert other.wait() == 7
    with pytest.raises(rpc.NotInitializedError):
        future.wait()


def test_a_callee_that_leaves_cancels_its_handlers(mesh: Mesh, watched: Watched) -> None:
    with mesh.agent(0).as_current():
        future = rpc.rpc_async(1, watched.watch)
        watched.await_entry()
        mesh.agent(1).shutdown(graceful=False)
        assert watched.await_end() == [True]
        with pytest.raises(rpc.WorkerDied):
            future.wait()

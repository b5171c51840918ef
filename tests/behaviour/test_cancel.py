"""Calls that are cancelled, at the caller and at the callee."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import zrpc as rpc
from tests.support.gates import Gate
from tests.support.targets import echo
from tests.support.waiting import SOON, until
from zrpc.functions import async_execution
from zrpc.testing import Mesh


class Watched(Gate):
    """A handler that tells how it ended."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []
        self.stays = False  # when it is cancelled, so that the answer comes too late
        self.ended = threading.Semaphore(0)

    def tell(self, what: Any) -> None:
        self.told.append(what)
        self.ended.release()

    def watch(self) -> None:
        """Runs until it is cancelled."""
        self.entered.release()
        self.tell(rpc.current_call().wait_cancelled(SOON))
        if self.stays:
            assert self.opened.wait(SOON)

    async def sleep(self) -> None:
        self.entered.release()
        try:
            await asyncio.sleep(SOON)
        except asyncio.CancelledError:
            self.tell("cancelled")
            raise
        self.tell("slept")

    def await_end(self, count: int = 1) -> list[Any]:
        for _ in range(count):
            assert self.ended.acquire(timeout=SOON), "the handler did not end"
        return self.told


@pytest.fixture
def watched() -> Iterator[Watched]:
    with Watched() as watched:
        yield watched


@pytest.fixture
def one_thread(caller: Mesh, monkeypatch: pytest.MonkeyPatch) -> Mesh:
    """Worker1 runs one handler, however long it takes, and queues the others."""
    monkeypatch.setattr(caller.agent(1).pool, "relieve", lambda: None)
    return caller


def busy(mesh: Mesh, rank: int = 1) -> int:
    """How many calls a worker has not answered."""
    return len(mesh.agent(rank).callee.requests)


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


def test_a_future_that_is_done_can_not_be_cancelled(shared: Mesh) -> None:
    future = rpc.rpc_async(1, echo, (5,))
    assert future.wait() == 5
    assert not future.cancel()
    assert not future.cancelled()
    assert future.wait() == 5


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
def test_one_that_waits_for_its_turn_never_runs(one_thread: Mesh, watched: Watched) -> None:
    with Gate() as gate:
        first = rpc.rpc_async(1, gate.wait_inside, ("first",))
        gate.await_entry()
        futures = [rpc.rpc_async(1, watched.tell, (i,)) for i in range(6)]
        until(lambda: busy(one_thread) == 7)
        for future in futures[::2]:
            assert future.cancel()
        until(lambda: busy(one_thread) == 4)
        gate.open()
        assert first.wait() == "first"
        torch.futures.wait_all(futures[1::2])
    assert sorted(watched.told) == [1, 3, 5]
    until(lambda: not one_thread.agent(1).pool.active)


@pytest.mark.zrpc(workers=2, options={"num_worker_threads": 1})
@pytest.mark.parametrize("end", ["cancel", "timeout"])
def test_what_is_dropped_leaves_the_queue(one_thread: Mesh, watched: Watched, end: str) -> None:
    """While the handlers before it still run: it would pile up otherwise."""
    with Gate() as gate:
        rpc.rpc_async(1, gate.wait_inside)
        gate.await_entry()
        pool = one_thread.agent(1).pool
        futures = [
            rpc.rpc_async(1, watched.tell, (i,), timeout=0.1 if end == "timeout" else 0)
            for i in range(5)
        ]
        if end == "cancel":
            until(lambda: busy(one_thread) == 6)
            assert all(future.cancel() for future in futures)
        for future in futures:
            with pytest.raises((rpc.RpcCancelledError, rpc.RpcTimeoutError)):
                future.wait()
        until(lambda: busy(one_thread) == 1 and not pool._backlog)
    assert watched.told == []


def test_a_coroutine_is_cancelled(
    shared: Mesh, watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    future = rpc.rpc_async(1, watched.sleep)
    watched.await_entry()
    assert future.cancel()
    assert watched.await_end() == ["cancelled"]
    until(lambda: not busy(shared))
    assert caplog.records == []  # it is no failure


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


class Keeper:
    """The value of an RRef."""

    def __init__(self, watched: Watched) -> None:
        self.watched = watched

    def watch(self) -> None:
        self.watched.watch()

    async def sleep(self) -> None:
        await self.watched.sleep()


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


def test_a_large_call_that_its_cancellation_overtakes(shared: Mesh, watched: Watched) -> None:
    for _ in range(20):
        future = rpc.rpc_async(1, tell_size, (watched, torch.zeros(1 << 18)))
        if not future.cancel():
            assert future.wait() == 1 << 18
    assert rpc.rpc_sync(1, tell_size, (watched, torch.zeros(1 << 18))) == 1 << 18
    until(lambda: not busy(shared))


def tell_size(watched: Watched, tensor: torch.Tensor) -> int:
    watched.tell(tensor.numel())
    return tensor.numel()


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


async def wait_for(future: Any) -> Any:
    return await future


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


def call_until_it_begins(watched: Watched, function: Any, args: Any = ()) -> None:
    """Has a call time out whose handler has begun: on a slow machine not at the first attempt."""
    watched.stays = True
    for timeout in (0.1, 0.5, 2.5, 12.5):
        with pytest.raises(rpc.RpcTimeoutError):
            rpc.rpc_sync(1, function, args, timeout=timeout)
        if watched.entered.acquire(timeout=0):
            return
    pytest.fail("the handler never began")


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


# -- calls of calls ----------------------------------------------------------------------------


def nested_sync(watched: Watched, *args: Any) -> None:
    with watched_end(watched):
        rpc.rpc_sync(0, watched.watch)


async def nested_await(watched: Watched, *args: Any) -> None:
    with watched_end(watched):
        await rpc.rpc_async(0, watched.watch)


async def nested_in_a_task(watched: Watched, *args: Any) -> None:
    with watched_end(watched):
        await asyncio.gather(wait_for(rpc.rpc_async(0, watched.watch)))


async def nested_sync_in_a_coroutine(watched: Watched, *args: Any) -> None:
    with watched_end(watched):
        rpc.rpc_sync(0, watched.watch)  # holds up the event loop


@async_execution
def nested_then(watched: Watched, *args: Any) -> Any:
    def callback(future: Any) -> None:
        with watched_end(watched):
            future.wait()

    return rpc.rpc_async(0, watched.watch).then(callback)


@async_execution
def nested_in_a_callback(watched: Watched, *args: Any) -> Any:
    first = rpc.rpc_async(0, echo, (1,))
    result: rpc.Future[None] = rpc.Future()

    def callback(future: Any) -> None:
        nested = rpc.rpc_async(0, watched.watch)
        nested.add_done_callback(finish)

    def finish(future: Any) -> None:
        with contextlib.suppress(rpc.RpcError), watched_end(watched):
            future.wait()
        result.set_result(None)

    first.add_done_callback(callback)
    return result


def nested_method(watched: Watched, keeper: Any) -> None:
    with watched_end(watched):
        keeper.rpc_sync().watch()


def nested_two_levels(watched: Watched, *args: Any) -> None:
    rpc.rpc_sync(0, relay, (watched,))


def relay(watched: Watched) -> None:
    with watched_end(watched):
        rpc.rpc_sync(1, watched.watch)


@contextlib.contextmanager
def watched_end(watched: Watched, suppress: bool = False) -> Iterator[None]:
    """Tells by which error a nested call has ended."""
    try:
        yield
    except BaseException as error:
        watched.tell(type(error))
        if not suppress:
            raise
    else:
        watched.tell("no error")


HANDLERS = [
    nested_sync,
    nested_await,
    nested_in_a_task,
    nested_sync_in_a_coroutine,
    nested_then,
    nested_in_a_callback,
    nested_method,
    nested_two_levels,
]
AWAITING = (nested_await, nested_in_a_task)


@pytest.mark.parametrize("handler", HANDLERS)
def test_the_end_of_a_call_reaches_its_nested_calls(
    shared: Mesh, watched: Watched, handler: Any
) -> None:
    keeper = rpc.RRef(Keeper(watched))
    future = rpc.rpc_async(1, handler, (watched, keeper), timeout=0)
    watched.await_entry()
    assert future.cancel()
    expected = asyncio.CancelledError if handler in AWAITING else rpc.RpcCancelledError
    told = watched.await_end(2)
    assert True in told  # the innermost handler
    assert expected in told
    until(lambda: not busy(shared) and not busy(shared, 0))
    assert rpc.rpc_sync(1, echo, (1,)) == 1


@pytest.mark.parametrize("handler", HANDLERS)
def test_a_deadline_reaches_nested_calls(shared: Mesh, watched: Watched, handler: Any) -> None:
    keeper = rpc.RRef(Keeper(watched))
    call_until_it_begins(watched, handler, (watched, keeper))
    told = watched.await_end(2)
    assert True in told
    assert {rpc.RpcTimeoutError, rpc.RpcCancelledError, asyncio.CancelledError} & set(told)
    watched.open()
    until(lambda: not busy(shared) and not busy(shared, 0))


def calls_on(watched: Watched) -> None:
    """Makes calls after its own was cancelled."""
    call = rpc.current_call()
    watched.entered.release()
    assert call.wait_cancelled(SOON)
    with watched_end(watched, suppress=True):
        rpc.rpc_sync(0, echo, (1,))
    with watched_end(watched, suppress=True):
        rpc.rpc_async(0, echo, (1,)).wait()
    with call.shield():
        watched.tell(rpc.rpc_sync(0, echo, (2,)))
        with pytest.raises(rpc.RpcError, match="no current call"):
            rpc.current_call()
    assert rpc.current_call().cancelled


def test_later_calls_need_a_shield(shared: Mesh, watched: Watched) -> None:
    future = rpc.rpc_async(1, calls_on, (watched,))
    watched.await_entry()
    future.cancel()
    assert watched.await_end(3) == [rpc.RpcCancelledError, rpc.RpcCancelledError, 2]
    until(lambda: not busy(shared))


def clean_up_late(watched: Watched) -> None:
    call = rpc.current_call()
    watched.entered.release()
    assert call.wait_cancelled(SOON)
    with call.shield():
        watched.tell(rpc.rpc_sync(0, echo, (2,)))


def test_a_shield_has_no_deadline(shared: Mesh, watched: Watched) -> None:
    call_until_it_begins(watched, clean_up_late, (watched,))
    assert watched.await_end() == [2]


@pytest.mark.zrpc(workers=2, options={"max_bytes_in_flight": 1 << 16})
def test_a_nested_call_that_waits_for_room(caller: Mesh, watched: Watched) -> None:
    """It is woken, and never sent."""
    future = rpc.rpc_async(1, fill_the_window, (watched,))
    watched.await_entry()
    window = caller.agent(1).caller.flow_control
    until(lambda: bool(window._waiting))
    assert future.cancel()
    assert rpc.RpcCancelledError in watched.await_end(2)
    until(lambda: not busy(caller) and not busy(caller, 0) and not len(window))
    assert not window._waiting


def fill_the_window(watched: Watched) -> None:
    with watched_end(watched):
        first = rpc.rpc_async(0, watch_with, (watched, bytes(1 << 16)))
        rpc.rpc_sync(0, watch_with, (watched, bytes(1 << 16)))
    first.wait()


def watch_with(watched: Watched, padding: bytes) -> None:
    watched.watch()


def wait_for_own_value(gate: Gate, watched: Watched) -> None:
    """At the owner, of a value that is still being made."""
    rref = rpc.remote(1, gate.wait_inside)
    watched.entered.release()
    with watched_end(watched):
        rref.to_here(timeout=0)


def test_a_deadline_reaches_the_wait_for_a_value_here(shared: Mesh, watched: Watched) -> None:
    with Gate() as gate:
        call_until_it_begins(watched, wait_for_own_value, (gate, watched))
        assert watched.await_end() == [rpc.RpcTimeoutError]
    until(lambda: not busy(shared))


# -- what may go wrong -------------------------------------------------------------------------


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


# -- the current call --------------------------------------------------------------------------


def test_there_is_none_outside_of_a_handler(shared: Mesh) -> None:
    with pytest.raises(rpc.RpcError, match="there is no current call"):
        rpc.current_call()


def describe() -> tuple[Any, ...]:
    call = rpc.current_call()
    return call.caller, call.cancelled, call.time_remaining(), repr(call)


async def describe_async() -> tuple[Any, ...]:
    await asyncio.sleep(0)
    return describe()


@async_execution
def describe_later() -> Any:
    return rpc.rpc_async(0, echo).then(lambda _: describe())


@pytest.mark.parametrize("function", [describe, describe_async, describe_later])
@pytest.mark.parametrize("timeout", [0, 5])
def test_what_it_reports(shared: Mesh, function: Any, timeout: float) -> None:
    caller, cancelled, remaining, text = rpc.rpc_sync(1, function, timeout=timeout)
    assert caller == rpc.get_worker_info(0)
    assert not cancelled
    assert remaining is None if not timeout else 0 < remaining <= timeout
    assert text == f"<Call from {caller}, waited for>"


def test_a_handler_in_a_handlers_thread_has_its_own(shared: Mesh) -> None:
    """A worker that calls itself."""
    assert rpc.rpc_sync(1, describe_both)


def describe_both() -> bool:
    outer = rpc.current_call()
    inner = rpc.rpc_sync(1, describe)
    return (outer.caller.id, inner[0].id) == (0, 1) and rpc.current_call().caller == outer.caller

"""Calls that are cancelled or time out: at the caller, at the callee, and in the calls it makes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

import zrpc as rpc
from tests.support.gates import Gate
from tests.support.observed import busy, stats_of
from tests.support.settled import caught
from tests.support.targets import echo
from tests.support.waiting import SOON, until
from tests.support.watched import Keeper, Watched, call_until_it_begins, wait_for
from tests.support.ways import by_async
from zrpc.functions import async_execution
from zrpc.testing import Mesh

# -- the future --------------------------------------------------------------------------------


def test_the_future_ends_at_once_and_callbacks_see_an_error(shared: Mesh, watched: Watched) -> None:
    of_call = rpc.rpc_async(1, watched.watch)
    watched.await_entry()
    for future in (of_call, rpc.Future[Any]()):
        then, failed = future.then(caught), future.then(lambda f: f.wait())
        assert not future.cancelled()
        assert future.cancel()
        assert (future.done(), future.cancelled()) == (True, True)
        assert not future.cancel()
        for wait in (future.wait, failed.wait, partial(torch.futures.wait_all, [future])):
            with pytest.raises(rpc.RpcCancelledError, match="was cancelled"):
                wait()
        with pytest.raises(concurrent.futures.CancelledError):
            future.value()
        assert then.wait() is future.then(caught).wait() is rpc.RpcCancelledError
        assert not then.cancelled()
    assert watched.await_end() == [True]


def test_a_future_of_then_cancels_the_call(shared: Mesh, watched: Watched) -> None:
    last = rpc.rpc_async(1, watched.watch).then(lambda f: f.wait()).then(lambda f: f.wait())
    assert last.cancel()
    with pytest.raises(rpc.RpcCancelledError):
        last.wait()
    assert not last.cancel()


# -- the callee --------------------------------------------------------------------------------


@pytest.mark.system
@pytest.mark.zrpc(workers=2, options={"num_worker_threads": 1})
def test_one_that_is_queued_never_runs(caller: Mesh, watched: Watched) -> None:
    """While the handlers before it still run: they would pile up otherwise."""
    with Gate() as gate:
        first = rpc.rpc_async(1, gate.work_inside, ("first",))
        gate.await_entry()
        futures = [rpc.rpc_async(1, watched.tell, (i,)) for i in range(6)]
        until(lambda: busy(caller) == 7)
        late = [rpc.rpc_async(1, watched.tell, (i,), timeout=0.1) for i in range(5)]
        for future in futures[::2]:
            assert future.cancel()
        for future in late:
            with pytest.raises(rpc.RpcTimeoutError):
                future.wait()
        until(lambda: busy(caller) == 4 and stats_of(caller, 1).threads.queued == 3)
        gate.open()
        assert first.wait() == "first"
        torch.futures.wait_all(futures[1::2])
    assert sorted(watched.told) == [1, 3, 5]
    until(lambda: not stats_of(caller, 1).threads.running)


def test_a_method_of_an_rref(shared: Mesh, watched: Watched) -> None:
    for owner in (0, 1):
        rref = rpc.remote(owner, Keeper, (watched,))
        for method in (rref.rpc_async().watch, rref.rpc_async().sleep):
            future = method()
            watched.await_entry()
            assert future.cancel()
            watched.await_end()
    assert watched.told == [True, "cancelled"] * 2


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


def test_a_task_that_is_cancelled_cancels_its_call(shared: Mesh, watched: Watched) -> None:
    async def main() -> None:
        futures = [rpc.rpc_async(1, watched.watch) for _ in range(3)]
        watched.await_entry(3)
        asyncio.get_running_loop().call_later(0.01, futures[2].cancel)
        with pytest.raises(rpc.RpcCancelledError):  # the task itself is not cancelled
            await futures[2]
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(futures[0], 0.01)
        task = asyncio.ensure_future(wait_for(futures[1]))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert all(future.cancelled() for future in futures)

    asyncio.run(main())
    assert watched.await_end(3) == [True] * 3


def test_a_cancelled_task_leaves_a_future_of_ones_own_to_others() -> None:
    future: rpc.Future[int] = rpc.Future()
    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(asyncio.wait_for(wait_for(future), 0.01))
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


# -- what may go wrong -------------------------------------------------------------------------


@pytest.mark.system
@pytest.mark.parametrize("to", [0, 1])
def test_cancellations_race_with_answers(
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
def test_who_leaves_cancels_its_handlers(caller: Mesh, watched: Watched) -> None:
    to_callee = rpc.rpc_async(1, watched.watch)
    other = rpc.rpc_async(1, echo, (7,))
    with caller.agent(2).as_current():
        of_caller = rpc.rpc_async(1, watched.watch)
    watched.await_entry(2)
    caller.agent(2).shutdown(graceful=False)
    assert watched.await_end() == [True]
    assert other.wait() == 7
    with pytest.raises(rpc.NotInitializedError):
        of_caller.wait()
    caller.agent(1).shutdown(graceful=False)
    assert watched.await_end() == [True, True]
    with pytest.raises(rpc.WorkerDied):
        to_callee.wait()


# -- the calls that a handler makes --------------------------------------------------------------


def nested_sync(watched: Watched, *args: Any) -> None:
    with watched_end(watched):
        rpc.rpc_sync(0, watched.watch)


async def nested_in_a_task(watched: Watched, *args: Any) -> None:
    with watched_end(watched):
        await asyncio.gather(wait_for(rpc.rpc_async(0, watched.watch)))  # a task of its own


async def nested_sync_in_a_coroutine(watched: Watched, *args: Any) -> None:
    with watched_end(watched):
        rpc.rpc_sync(0, watched.watch)  # holds up the event loop


@async_execution
def nested_in_a_callback(watched: Watched, *args: Any) -> Any:
    result: rpc.Future[None] = rpc.Future()

    def finish(future: Any) -> None:
        try:
            with watched_end(watched):
                future.wait()
        except rpc.RpcError as error:  # it may come before the caller's own time is over
            result.set_exception(error)

    first = rpc.rpc_async(0, echo, (1,))
    first.then(lambda _: rpc.rpc_async(0, watched.watch).add_done_callback(finish))
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
def watched_end(watched: Watched) -> Iterator[None]:
    """Tells by which error a nested call has ended."""
    try:
        yield
    except BaseException as error:
        watched.tell(type(error))
        raise
    watched.tell("no error")


HANDLERS = [
    *(nested_sync, nested_sync_in_a_coroutine, nested_in_a_callback),
    *(nested_method, nested_two_levels, nested_in_a_task),
]


@pytest.mark.parametrize("handler", HANDLERS)
@pytest.mark.parametrize("end", ["cancel", "deadline"])
def test_nested_calls_end_too(shared: Mesh, watched: Watched, handler: Any, end: str) -> None:
    keeper = rpc.RRef(Keeper(watched))
    expected = {asyncio.CancelledError if handler is nested_in_a_task else rpc.RpcCancelledError}
    if end == "cancel":
        future = rpc.rpc_async(1, handler, (watched, keeper), timeout=0)
        watched.await_entry()
        assert future.cancel()
    else:
        call_until_it_begins(watched, handler, (watched, keeper))
        expected |= {rpc.RpcTimeoutError, rpc.RpcCancelledError}
    told = watched.await_end(2)
    assert True in told  # the innermost handler
    assert expected & set(told)
    watched.open()
    until(lambda: not busy(shared) and not busy(shared, 0))


def calls_on(watched: Watched) -> None:
    """Makes calls after its own was cancelled or has timed out."""
    call = rpc.current_call()
    watched.entered.release()
    assert call.wait_cancelled(SOON)
    for way in (rpc.rpc_sync, by_async):
        with contextlib.suppress(rpc.RpcError), watched_end(watched):
            way(0, echo, (1,))
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
    call_until_it_begins(watched, calls_on, (watched,))  # a shield has no deadline
    assert watched.await_end(3)[-1] == 2


def wait_for_own_value(gate: Gate, watched: Watched) -> None:
    """At the owner, of a value that is still being made."""
    rref = rpc.remote(1, gate.wait_inside)
    watched.entered.release()
    with watched_end(watched):
        rref.to_here(timeout=0)


def test_a_deadline_reaches_the_wait_for_a_value_here(shared: Mesh, watched: Watched) -> None:
    with Gate() as gate:
        call_until_it_begins(watched, wait_for_own_value, (gate, watched))
        assert set(watched.await_end()) == {rpc.RpcTimeoutError}
    until(lambda: not busy(shared))

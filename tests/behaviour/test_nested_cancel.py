"""The end of a call that is cancelled or times out reaches the calls that its handler made."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

import zrpc as rpc
from tests.support.gates import Gate
from tests.support.observed import busy, calls_to
from tests.support.targets import echo
from tests.support.waiting import SOON, until
from tests.support.watched import Keeper, Watched, call_until_it_begins, wait_for
from zrpc.functions import async_execution
from zrpc.testing import Mesh


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
        try:
            with watched_end(watched):
                future.wait()
        except rpc.RpcError as error:  # it may come before the caller's own time is over
            result.set_exception(error)

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
@pytest.mark.parametrize("end", ["cancel", "deadline"])
def test_the_end_of_a_call_reaches_its_nested_calls(
    shared: Mesh, watched: Watched, handler: Any, end: str
) -> None:
    keeper = rpc.RRef(Keeper(watched))
    expected = {asyncio.CancelledError if handler in AWAITING else rpc.RpcCancelledError}
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
    until(lambda: calls_to(caller, 0, rank=1).calls_without_room == 1)
    assert future.cancel()
    assert rpc.RpcCancelledError in watched.await_end(2)
    until(lambda: not busy(caller) and not busy(caller, 0))
    until(lambda: not calls_to(caller, 0, rank=1).bytes_in_flight)
    assert not calls_to(caller, 0, rank=1).calls_without_room


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
        assert set(watched.await_end()) == {rpc.RpcTimeoutError}
    until(lambda: not busy(shared))

"""Callers that are faster than the worker that they call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import zrpc as rpc
from tests.support.pending import bytes_in_flight, queued
from tests.support.waiting import until
from zrpc.calls.pending_calls import OVERHEAD_BYTES, PendingCalls
from zrpc.testing import Mesh
from zrpc.testing.plugin import MakeMesh

LIMIT = 1 << 20
SIZE = LIMIT // 16  # of one argument
pytestmark = pytest.mark.zrpc(workers=2, timeout=90, options={"max_bytes_in_flight": LIMIT})

gate = threading.Event()


def until_empty(calls: PendingCalls) -> None:
    """Waits until no call takes any room: the thread that settles one wakes the caller first."""
    until(lambda: not bytes_in_flight(calls), "all room is free")


@pytest.fixture(autouse=True)
def closed_gate() -> Iterator[Any]:
    gate.clear()
    yield
    gate.set()


def slow(tensor: Any) -> Any:
    assert gate.wait(30)
    return tensor.numel()


def relay(count: Any) -> Any:
    """In a handler: calls back, more than fits into the window."""
    tensor = torch.zeros(SIZE // 4)
    return sum(f.wait() for f in [rpc.rpc_async(0, torch.numel, (tensor,)) for _ in range(count)])


def flood(count: Any) -> Any:
    tensor = torch.zeros(SIZE // 4)
    futures = [rpc.rpc_async(1, slow, (tensor,)) for _ in range(count)]
    return sum(future.wait() for future in futures)


def test_calls_wait_rather_than_pile_up(mesh: Mesh) -> None:
    calls = mesh.agent(0).caller.calls
    with ThreadPoolExecutor(1) as pool:
        flooding = pool.submit(mesh.run, 0, flood, 40)
        until(lambda: queued(calls) or flooding.done(), "a call waits for room")
        assert not flooding.done()
        assert 0 < bytes_in_flight(calls) <= LIMIT
        # Calls of other threads wait behind it, not beyond their timeouts.
        with (
            mesh.agent(0).as_current(),
            pytest.raises(rpc.RpcTimeoutError, match="max_bytes_in_flight"),
        ):
            rpc.rpc_sync(1, abs, (-1,), timeout=0.05)
        with mesh.agent(0).as_current():
            assert rpc.rpc_sync(0, abs, (-1,), timeout=20) == 1  # another worker
        gate.set()
        assert flooding.result(30) == 40 * SIZE // 4
    until_empty(calls)


def pause(number: Any) -> Any:
    assert gate.wait(30)
    return number


def flood_with_small_ones(count: Any) -> Any:
    return [future.wait() for future in [rpc.rpc_async(1, pause, (i,)) for i in range(count)]]


@pytest.mark.system
def test_also_small_calls_wait(mesh: Mesh) -> None:
    """So that their number is bounded, at the caller and at the callee."""
    calls, most = mesh.agent(0).caller.calls, LIMIT // OVERHEAD_BYTES
    with ThreadPoolExecutor(1) as pool:
        flooding = pool.submit(mesh.run, 0, flood_with_small_ones, 4 * most)
        until(lambda: queued(calls) or flooding.done(), "a call waits for room")
        assert not flooding.done()
        assert most // 2 < len(mesh.agent(0).caller.calls) <= most + 1
        assert len(mesh.agent(1).callee.requests) <= most
        gate.set()
        assert flooding.result(30) == list(range(4 * most))
    until_empty(calls)


def fill(to: Any) -> Any:
    padding = torch.zeros(SIZE // 4)
    futures = [rpc.rpc_async(to, call_back, (1 - to, padding)) for _ in range(40)]
    return sum(future.wait() for future in futures)


def test_handlers_are_not_held_up_by_the_calls_that_wait_for_them(mesh: Mesh) -> None:
    """Both workers fill their windows with calls whose handlers call back."""
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(mesh.run, rank, fill, 1 - rank) for rank in range(2)]
        assert [future.result(30) for future in futures] == [40 * SIZE // 4] * 2


def call_back(to: Any, padding: Any) -> Any:
    return rpc.rpc_sync(to, torch.numel, (padding,))


def test_a_handler_may_call_more_than_fits(mesh: Mesh) -> None:
    assert mesh.run(0, rpc.rpc_sync, 1, relay, (40,)) == 40 * SIZE // 4


def remaining() -> Any:
    return rpc.current_call().time_remaining()


@pytest.mark.system
def test_the_wait_for_room_counts_as_part_of_the_timeout(mesh: Mesh) -> None:
    """Also for the callee, which else would work on when nobody waits."""
    opener = threading.Timer(0.3, gate.set)
    with mesh.agent(0).as_current():
        first = rpc.rpc_async(1, slow, (torch.zeros(LIMIT // 4),))
        opener.start()
        assert rpc.rpc_sync(1, remaining, timeout=20) < 19.8
        first.wait()
    opener.join()


async def flood_from_a_coroutine(to: Any, count: Any) -> Any:
    """Changes the tensor after each call, which is to arrive as it was."""
    tensor = torch.zeros(SIZE // 4)
    futures = []
    for number in range(count):
        tensor.fill_(number)
        futures.append(rpc.rpc_async(to, slow_mean, (tensor,)))
    flooded.set()
    return [await future for future in futures]


flooded = threading.Event()


def slow_mean(tensor: Any) -> Any:
    assert gate.wait(30)
    return tensor.mean().item()


@pytest.mark.parametrize("where", ["handler", "own loop"])
def test_calls_from_a_coroutine_are_sent_when_there_is_room(mesh: Mesh, where: str) -> None:
    flooded.clear()
    here, there = (1, 0) if where == "handler" else (0, 1)

    def flood_here() -> Any:
        if where == "handler":
            return rpc.rpc_sync(here, flood_from_a_coroutine, (there, 40))
        return asyncio.run(flood_from_a_coroutine(there, 40))

    agent = mesh.agent(here)
    with ThreadPoolExecutor(1) as pool:
        flooding = pool.submit(mesh.run, 0, flood_here)
        assert flooded.wait(30)  # the coroutine was not held up
        assert len(agent.caller.calls) >= 40
        assert bytes_in_flight(agent.caller.calls) <= LIMIT
        assert len(mesh.agent(there).callee.requests) <= 17  # 16 that fit, and that of the handler
        gate.set()
        assert flooding.result(30) == [float(number) for number in range(40)]
    until_empty(agent.caller.calls)


async def cancel_what_waits() -> Any:
    tensor = torch.zeros(SIZE // 4)
    futures = [rpc.rpc_async(1, slow, (tensor,)) for _ in range(40)]
    cancelled = [future.cancel() for future in futures[20:]]
    gate.set()
    return all(cancelled), sum([await future for future in futures[:20]])


def test_what_a_coroutine_cancels_is_never_sent(mesh: Mesh) -> None:
    sent = mesh.agent(0).network.sent([1])
    assert mesh.run(0, asyncio.run, cancel_what_waits()) == (True, 20 * SIZE // 4)
    assert mesh.agent(0).network.sent([1]) - sent == 20
    until_empty(mesh.agent(0).caller.calls)


async def wait_in_vain() -> Any:
    tensor = torch.zeros(SIZE // 4)
    futures = [rpc.rpc_async(1, slow, (tensor,)) for _ in range(20)]
    with pytest.raises(rpc.RpcTimeoutError, match="max_bytes_in_flight"):
        await rpc.rpc_async(1, slow, (tensor,), timeout=0.05)
    gate.set()
    return sum([await future for future in futures])


def test_a_call_from_a_coroutine_that_finds_no_room_times_out(mesh: Mesh) -> None:
    assert mesh.run(0, asyncio.run, wait_in_vain()) == 20 * SIZE // 4
    until_empty(mesh.agent(0).caller.calls)


def test_calls_from_a_coroutine_that_wait_for_room_end_with_the_mesh(make_mesh: MakeMesh) -> None:
    mesh = make_mesh(workers=2, options={"max_bytes_in_flight": LIMIT})

    async def leave() -> Any:
        tensor = torch.zeros(SIZE // 4)
        futures = [rpc.rpc_async(1, slow, (tensor,)) for _ in range(40)]
        rpc.shutdown(graceful=False)
        return await asyncio.gather(*futures, return_exceptions=True)

    outcomes = mesh.run(0, asyncio.run, leave())
    assert {type(outcome) for outcome in outcomes} == {rpc.NotInitializedError}
    gate.set()


@pytest.mark.parametrize("value", [-1, -(1 << 30)])
def test_a_negative_limit_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="max_bytes_in_flight must be 0"):
        rpc.ZmqRpcBackendOptions(max_bytes_in_flight=value)


def note_the_rest_of_the_time() -> None:
    call = rpc.current_call()
    times_left.append(call.time_remaining())


times_left: list[float | None] = []


@pytest.mark.parametrize("in_event_loop", [False, True])
def test_room_that_comes_at_the_deadline(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, in_event_loop: bool
) -> None:
    """A deadline of 0 in the request would mean that there is none."""
    times_left.clear()
    caller = mesh.agent(0).caller
    calls = caller.calls
    with mesh.agent(0).as_current():
        filling = rpc.rpc_async(1, slow, (torch.zeros(LIMIT // 4),))
        until(lambda: len(mesh.agent(1).callee.requests), "the window is full")
        # The I/O thread is late, and so is the thread that gets room: both go on after it.
        monkeypatch.setattr(caller.calls, "expire", lambda now: None)
        issue = caller._send

        def issue_late(call: Any, *args: Any, **kwargs: Any) -> None:
            until(lambda: not call.remaining(), "the deadline has passed")
            issue(call, *args, **kwargs)

        monkeypatch.setattr(caller, "_send", issue_late)

        async def call_in_a_loop() -> Any:
            return await rpc.rpc_async(1, note_the_rest_of_the_time, timeout=0.3)

        def call() -> Any:
            with mesh.agent(0).as_current():
                if in_event_loop:
                    return asyncio.run(call_in_a_loop())
                return rpc.rpc_sync(1, note_the_rest_of_the_time, timeout=0.3)

        with ThreadPoolExecutor(1) as pool:
            calling = pool.submit(call)
            until(lambda: queued(calls), "a call waits for room")
            gate.set()
            filling.wait()
            with pytest.raises(rpc.RpcTimeoutError):
                calling.result(30)
        monkeypatch.undo()
        rpc.rpc_sync(1, abs, (-1,))  # what was sent before has come
        until(lambda: not len(mesh.agent(1).callee.requests), "all handlers have ended")
    assert None not in times_left
    until_empty(calls)

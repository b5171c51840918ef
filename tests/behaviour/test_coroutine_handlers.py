"""Handlers that are coroutines: async def."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

import zrpc as rpc
from tests.support.gates import Gate
from tests.support.later import Later, already_done
from tests.support.targets import echo
from tests.support.waiting import SOON
from tests.support.ways import Call, ways
from zrpc.testing import Mesh


async def double(x: int) -> int:
    await asyncio.sleep(0)
    return 2 * x


async def call_further(to: int, x: int) -> int:
    return await rpc.rpc_async(to, double, (x,)) + 1


async def fail_later(error: BaseException) -> None:
    await asyncio.sleep(0)
    raise error


async def where() -> tuple[str, int, str]:
    loop = asyncio.get_running_loop()
    return rpc.get_worker_info().name, id(loop), threading.current_thread().name


_events: dict[int, asyncio.Event] = {}


async def wait_for_event(key: int) -> str:
    event = _events.setdefault(key, asyncio.Event())
    await asyncio.wait_for(event.wait(), SOON)
    return "was set"


async def set_event(key: int) -> None:
    _events.setdefault(key, asyncio.Event()).set()


@ways
def test_async_def(shared: Mesh, call: Call) -> None:
    for to in (0, 1):
        assert call(to, double, (4,)) == 8
        assert call(to, double, kwargs={"x": 5}) == 10
        assert call(to, Later(3).coroutine, (4,)) == 7
        assert call(1, call_further, (to, 4)) == 9


@ways
def test_async_def_that_fails(shared: Mesh, call: Call) -> None:
    with pytest.raises(KeyError) as info:
        call(1, fail_later, (KeyError("k"),))
    assert info.value.args == ("k",)
    assert "fail_later" in str(info.value.__cause__)


async def cancel_itself() -> None:
    raise asyncio.CancelledError


def test_async_def_that_is_cancelled(shared: Mesh) -> None:
    with pytest.raises(rpc.RemoteError, match="CancelledError"):
        rpc.rpc_sync(1, cancel_itself, timeout=5)
    assert rpc.rpc_sync(1, double, (1,)) == 2


async def stop_the_loop() -> str:
    asyncio.get_running_loop().stop()
    return "stopped"


@pytest.mark.zrpc(timeout=15)
def test_async_def_that_stops_its_loop(caller: Mesh) -> None:
    """The others go on, and the worker shuts down as ever: the fixture sees to that."""
    _events.clear()
    waiting = rpc.rpc_async(1, wait_for_event, (8,))
    assert rpc.rpc_sync(1, stop_the_loop, timeout=5) == "stopped"
    rpc.rpc_sync(1, set_event, (8,), timeout=5)
    assert waiting.wait() == "was set"


def test_all_run_in_the_workers_own_loop(shared: Mesh) -> None:
    places = {rpc.rpc_sync(to, where) for to in (0, 1, 0, 1)}
    assert len(places) == 2
    assert {name for name, _, _ in places} == {"worker0", "worker1"}
    assert len({loop for _, loop, _ in places}) == 2


def test_coroutines_of_one_worker_can_meet(shared: Mesh) -> None:
    _events.clear()
    waiting = [rpc.rpc_async(1, wait_for_event, (7,)) for _ in range(30)]
    rpc.rpc_sync(1, set_event, (7,))
    assert torch.futures.wait_all(waiting) == ["was set"] * 30


async def gather_from(peers: list[int], count: int) -> int:
    return sum(await asyncio.gather(*[rpc.rpc_async(p, double, (1,)) for p in peers * count]))


@pytest.mark.zrpc(workers=3, options={"num_worker_threads": 1})
def test_a_fan_out_in_async_def(caller: Mesh) -> None:
    assert rpc.rpc_sync(1, gather_from, ([0, 1, 2], 30)) == 180


async def blocks(gate: Gate) -> None:
    gate.wait_inside()


def test_a_coroutine_that_blocks_its_loop_holds_up_no_other_calls(shared: Mesh, gate: Gate) -> None:
    blocked = rpc.rpc_async(1, blocks, (gate,))
    gate.await_entry()
    assert rpc.rpc_sync(1, echo, (1,)) == 1
    assert rpc.rpc_sync(1, already_done, (2,)) == 2
    gate.open()
    assert blocked.wait() is None

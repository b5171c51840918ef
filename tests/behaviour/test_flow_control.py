"""Callers that are faster than the worker that they call, and small messages beside large ones."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
import torch

import zrpc as rpc
from tests.support.gates import Gate
from tests.support.identity import emptied
from tests.support.observed import busy, calls_to, stats_of
from tests.support.steps import at_step, some_steps
from tests.support.waiting import SOON, until
from zrpc.testing import Mesh
from zrpc.testing.plugin import MakeMesh

LIMIT = 1 << 20
PART = bytes(LIMIT // 16)
pytestmark = pytest.mark.zrpc(workers=2, timeout=90, options={"max_bytes_in_flight": LIMIT})


def until_waiting(mesh: Mesh, count: int = 1, rank: int = 0) -> None:
    until(lambda: calls_to(mesh, 1 - rank, rank).calls_without_room == count, "calls without room")


def until_empty(mesh: Mesh, rank: int = 0) -> None:
    """Waits until no call takes any room: the thread that settles one wakes the caller first."""
    until(lambda: not any(each.bytes_in_flight for each in stats_of(mesh, rank).peers.values()))
    assert not calls_to(mesh, 1 - rank, rank).calls_without_room


def flood(gate: Gate, count: int, argument: Any = PART) -> int:
    futures = [rpc.rpc_async(1, gate.wait_inside, (argument,)) for _ in range(count)]
    return sum(future.wait() == argument for future in futures)


def test_calls_wait_rather_than_pile_up(caller: Mesh, gate: Gate) -> None:
    flooding = caller.submit(0, flood, gate, 40)
    until(lambda: "worker1" in stats_of(caller).peers)
    until_waiting(caller)
    assert 0 < calls_to(caller, 1).bytes_in_flight <= LIMIT
    # Calls of other threads wait behind it, not beyond their timeouts.
    with pytest.raises(rpc.RpcTimeoutError, match=r"not sent within.*50 ms.*max_bytes_in_fl"):
        rpc.rpc_sync(1, abs, (-1,), timeout=0.05)
    assert rpc.rpc_sync(0, abs, (-1,), timeout=20) == 1  # another worker
    gate.open()
    assert flooding.result(SOON) == 40
    until_empty(caller)


def call_back(to: int, padding: bytes) -> int:
    return rpc.rpc_sync(to, len, (padding,))


def call_with_calls_back(to: int) -> int:
    futures = [rpc.rpc_async(to, call_back, (1 - to, PART)) for _ in range(40)]
    return sum(future.wait() for future in futures)


def test_handlers_are_not_held_up_by_the_calls_that_wait_for_them(mesh: Mesh) -> None:
    """Both workers fill their windows with calls whose handlers call back."""
    futures = [mesh.submit(rank, call_with_calls_back, 1 - rank) for rank in range(2)]
    assert [future.result(SOON) for future in futures] == [40 * len(PART)] * 2


def time_left() -> float | None:
    times_left.append(rpc.current_call().time_remaining())
    return times_left[-1]


times_left: list[float | None] = []


@pytest.mark.system
def test_the_wait_for_room_counts_as_part_of_the_timeout(caller: Mesh, gate: Gate) -> None:
    """Also for the callee, which else would work on when nobody waits."""
    filling = caller.submit(0, flood, gate, 1, bytes(LIMIT))
    gate.await_entry()
    opener = threading.Timer(0.3, gate.open)
    opener.start()
    assert rpc.rpc_sync(1, time_left, timeout=20) < 19.8
    opener.join()
    filling.result(SOON)


@pytest.mark.system
def test_room_that_comes_at_the_deadline(caller: Mesh) -> None:
    """The caller is late, at any step. A deadline of 0 in the request would mean no deadline."""

    def late(number: int) -> bool:
        with Gate() as gate:
            filling = rpc.rpc_async(1, gate.wait_inside, (bytes(LIMIT),))
            opener = threading.Timer(0.002, gate.open)
            with at_step(number, lambda: time.sleep(0.015)) as steps:
                try:
                    opener.start()
                    rpc.rpc_sync(1, time_left, timeout=0.01)
                except rpc.RpcTimeoutError:
                    pass
            opener.join()
            filling.wait()
        return bool(steps.place)

    times_left.clear()
    for number in some_steps(lambda: late(0)):
        late(number)
    until(lambda: not busy(caller), "all handlers have ended")
    assert None not in times_left
    until_empty(caller)


# -- calls of coroutines, which never wait for room before they return a future --------------------


async def flood_from_a_coroutine(to: int, count: int, gate: Gate, flooded: Gate) -> list[int]:
    """Changes the argument after each call, which must arrive as it was."""
    argument = bytearray(PART)
    futures = []
    for number in range(count):
        argument[0] = number
        futures.append(rpc.rpc_async(to, gate.wait_inside, (argument,)))
    flooded.open()
    return [(await future)[0] for future in futures]


@pytest.mark.parametrize("in_handler", [True, False])
def test_calls_of_coroutines_wait_for_room(mesh: Mesh, gate: Gate, in_handler: bool) -> None:
    here, there = (1, 0) if in_handler else (0, 1)
    with Gate() as flooded:
        arguments = (there, 40, gate, flooded)
        if in_handler:
            flooding = mesh.submit(0, rpc.rpc_sync, here, flood_from_a_coroutine, arguments)
        else:
            flooding = mesh.submit(0, asyncio.run, flood_from_a_coroutine(*arguments))
        assert flooded.opened.wait(SOON)  # the coroutine was not held up
        assert stats_of(mesh, here).calls_in_flight >= 40
        assert calls_to(mesh, there, here).bytes_in_flight <= LIMIT
        assert busy(mesh, there) <= 17  # 16 that fit, and that of the handler
        gate.open()
        assert flooding.result(SOON) == list(range(40))
    until_empty(mesh, here)


def test_calls_of_coroutines_end_with_the_mesh(mesh: Mesh, gate: Gate) -> None:
    async def leave() -> list[Any]:
        futures = [rpc.rpc_async(1, gate.wait_inside, (PART,)) for _ in range(40)]
        rpc.shutdown(graceful=False)
        return await asyncio.gather(*futures, return_exceptions=True)

    outcomes = mesh.run(0, asyncio.run, leave())
    assert {type(outcome) for outcome in outcomes} == {rpc.NotInitializedError}


# -- small messages beside large ones --------------------------------------------------------------

MIB = 1 << 20
order: list[str] = emptied([])


def note(tensor: torch.Tensor, name: str) -> int:
    order.append(name)
    return tensor.numel()


def send_both(size: int) -> int:
    """A large call, and then small ones until the large one is done."""
    order.clear()
    large = rpc.rpc_async(1, note, (torch.zeros(size, dtype=torch.uint8), "large"))
    while not large.done():
        rpc.rpc_sync(1, note, (torch.zeros(1), "small"))
    assert large.wait() == size
    return order.index("large")


@pytest.mark.system
@pytest.mark.parametrize(
    "options",
    [
        {"transport": "tcp"},
        {"transport": "tcp", "security": "none"},
        {"transport": "ipc", "shared_memory": 0},
    ],
    ids=["tcp", "plain tcp", "ipc"],
)
@pytest.mark.filterwarnings("ignore:.*security")
def test_small_calls_do_not_wait_for_a_large_one(make_mesh: MakeMesh, options: Any) -> None:
    mesh = make_mesh(workers=2, options={**options, "max_bytes_in_flight": 0})
    for _ in range(5):
        # How many is a matter of speed; that any get through before it is not.
        if mesh.run(0, send_both, 128 * MIB) > 0:
            break
    else:
        pytest.fail("all small calls waited until the large one was there")


@pytest.mark.system
def test_a_graceful_shutdown_waits_for_large_messages(make_mesh: MakeMesh) -> None:
    mesh = make_mesh(workers=2, options={"transport": "ipc", "shared_memory": 0})
    mesh.run(0, rpc.rpc_async, 1, note, (torch.zeros(64 * MIB, dtype=torch.uint8), "large"))
    mesh.shutdown()
    assert order == ["large"]

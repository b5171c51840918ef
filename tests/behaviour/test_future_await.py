"""Futures in asyncio: await."""

from __future__ import annotations

import asyncio
import contextlib
import operator
from collections.abc import Callable
from typing import Any

import pytest

import zrpc as rpc
from tests.support.gates import Gate
from tests.support.targets import echo
from tests.support.threads import start_all
from tests.support.waiting import SOON
from zrpc.testing import Mesh


def test_await(shared: Mesh) -> None:
    async def main() -> Any:
        future = rpc.rpc_async(1, operator.add, (1, 2))
        return await future, await future

    assert asyncio.run(main()) == (3, 3)


def test_await_does_not_block_the_loop(shared: Mesh) -> None:
    async def main() -> list[str]:
        with Gate() as gate:
            order: list[str] = []

            async def waits() -> None:
                order.append(await rpc.rpc_async(1, gate.wait_inside, ("answer",)))

            task = asyncio.ensure_future(waits())
            await asyncio.sleep(0)
            order.append("the loop runs")
            gate.open()
            await asyncio.wait_for(task, SOON)
            return order

    assert asyncio.run(main()) == ["the loop runs", "answer"]


def test_asyncio_wait_for_what_is_no_future_of_asyncio_is_an_error(shared: Mesh) -> None:
    async def main() -> None:
        with Gate() as gate:
            future = rpc.rpc_async(1, gate.wait_inside, (1,))
            with pytest.raises(TypeError, match="give it ensure_future"):
                await asyncio.wait([future])
            gate.open()
            assert await future == 1

    asyncio.run(main())


def test_wait_for_times_out(shared: Mesh, gate: Gate) -> None:
    async def main(gate: Gate) -> Any:
        future = rpc.rpc_async(1, gate.wait_inside, (5,))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.shield(future), 0.01)
        gate.open()
        return await future  # it goes on, and can be awaited again

    assert asyncio.run(main(gate)) == 5


def test_await_of_several_loops_at_once(shared: Mesh, gate: Gate) -> None:
    future = rpc.rpc_async(1, gate.wait_inside, (5,))

    async def main() -> int:
        return await future

    finish = start_all([lambda: asyncio.run(main())] * 4, SOON)
    gate.open()
    assert finish() == [5] * 4


def test_a_loop_that_was_closed_meanwhile(shared: Mesh, gate: Gate) -> None:
    future = rpc.rpc_async(1, gate.wait_inside, (5,))

    async def main() -> Any:
        waiting = future.__await__()
        next(waiting)
        return waiting

    waiting = asyncio.run(main())
    gate.open()
    assert future.wait() == 5
    waiting.close()


def failed() -> rpc.Future[Any]:
    future: rpc.Future[Any] = rpc.Future()
    future.set_exception(KeyError("k"))
    return future


async def within_no_time(future: rpc.Future[Any]) -> Any:
    async with asyncio.timeout(0):
        return await future


WAYS: list[Callable[[rpc.Future[Any]], Any]] = [
    lambda future: within_no_time(future),
    lambda future: asyncio.wait_for(future, 0),
    lambda future: asyncio.wait_for(future, SOON),
    lambda future: first(asyncio.gather(future, future)),
    asyncio.shield,
    lambda future: next(iter(asyncio.as_completed([future]))),
    asyncio.ensure_future,
]


async def first(several: Any) -> Any:
    return (await several)[0]


def test_asyncio_gets_the_value_of_a_future_that_is_done_and_its_error(shared: Mesh) -> None:
    async def main(ask: Callable[[rpc.Future[Any]], Any]) -> Any:
        done, bad = rpc.rpc_async(1, echo, (7,)), failed()
        done.wait()
        with pytest.raises(KeyError):
            await ask(bad)
        return await ask(done)

    for ask in WAYS:
        assert asyncio.run(main(ask)) == 7


def test_await_of_a_done_future_does_not_turn_the_loop(shared: Mesh) -> None:
    async def main() -> list[str]:
        done = rpc.rpc_async(1, echo, (7,))
        done.wait()
        order: list[str] = []
        asyncio.get_running_loop().call_soon(order.append, "a turn")
        order.append(await done)
        await asyncio.sleep(0)
        return order

    assert asyncio.run(main()) == [7, "a turn"]


def test_a_done_future_is_run_by_any_loop() -> None:
    done: rpc.Future[int] = rpc.Future()
    done.set_result(7)
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        assert loop.run_until_complete(done) == 7


def test_asyncio_wait_of_done_futures() -> None:
    async def main() -> Any:
        done: rpc.Future[int] = rpc.Future()
        done.set_result(7)
        found, pending = await asyncio.wait([done], timeout=SOON)
        return found == {done}, pending

    assert asyncio.run(main()) == (True, set())

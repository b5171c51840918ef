"""Handlers that answer later: by a future, or as a coroutine."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import pytest
import torch

import zrpc as rpc
from tests.support.gates import Gate
from tests.support.identity import emptied, here
from tests.support.targets import echo, fail
from tests.support.waiting import SOON, until
from tests.support.ways import WAYS, Call, ways
from zrpc.functions import async_execution
from zrpc.testing import Mesh

ALREADY = "Functions decorated with @rpc.async_function must return a torch.futures.Future object,"
ONE_THREAD = pytest.mark.zrpc(options={"num_worker_threads": 1})


# -- async_execution -----------------------------------------------------------------------------


def done(value: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


@async_execution
def already_done(value: Any) -> Any:
    return done(value)


@async_execution
def add_on(to: int, x: int, y: int, z: int = 0) -> Any:
    return rpc.rpc_async(to, sum, ([x, y],)).then(lambda f: f.wait() + z)


class Later:
    """async_execution on methods of every kind."""

    def __init__(self, n: int) -> None:
        self.n = n

    @async_execution
    def method(self, x: int) -> Any:
        return rpc.rpc_async(0, echo, (x,)).then(lambda f: f.wait() + self.n)

    @staticmethod
    @async_execution
    def static(x: int) -> Any:
        return rpc.rpc_async(0, echo, (x,)).then(lambda f: f.wait() + 1)

    @classmethod
    @async_execution
    def of_class(cls, x: int) -> Any:
        return rpc.rpc_async(0, echo, (x,)).then(lambda f: (cls.__name__, f.wait()))

    @async_execution
    def no_future(self, value: Any = 5) -> Any:
        return value

    async def coroutine(self, x: int) -> int:
        await asyncio.sleep(0)
        return self.n + x


@ways
def test_a_function_answers_with_the_value_of_its_future(shared: Mesh, call: Call) -> None:
    offset = 100

    @async_execution
    def local(x: int) -> Any:
        return rpc.rpc_async(0, echo, (x,)).then(lambda f: f.wait() + offset)

    assert call(1, add_on, (0, 1, 2, 3)) == call(0, add_on, (0, 1, 2, 3)) == 6
    assert call(1, add_on, (1, 1, 2), {"z": 4}) == 7
    assert call(1, already_done, ("x",)) == "x"
    assert call(1, local, (1,)) == 101
    assert call(1, Later(5).method, (1,)) == 6
    assert call(1, Later.method, (Later(7), 1)) == 8
    assert call(1, Later.static, (1,)) == call(1, Later(5).static, (1,)) == 2
    assert call(1, Later.of_class, (1,)) == ("Later", 1)


def test_the_decorated_function_can_be_called_here(shared: Mesh) -> None:
    assert add_on(1, 1, 2, 3).wait() == 6
    assert add_on.__name__ == "add_on"
    assert hasattr(add_on, "_wrapped_async_rpc_function")  # as torch marks it


class PackedBy:
    """Arrives as the thread that packs it."""

    def __reduce__(self) -> Any:
        return int, (threading.get_ident(),)


def test_a_future_that_is_done_takes_no_other_thread(shared: Mesh) -> None:
    function = async_execution(lambda: done((threading.get_ident(), PackedBy())))
    for _ in range(20):
        ran, packed = rpc.rpc_sync(1, function)
        assert ran == packed


def failed() -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_exception(KeyError("set"))
    return future


def test_a_future_that_fails_or_none_at_all_is_the_callers_error(shared: Mesh) -> None:
    functions: list[tuple[Any, str]] = [
        (failed, "set"),
        (lambda: fail(KeyError("at once")), "at once"),
        (lambda: rpc.rpc_async(0, echo).then(lambda f: fail(KeyError("in then"))), "in then"),
        (lambda: rpc.rpc_async(0, fail, (KeyError("over there"),)), "over there"),
    ]
    for call in WAYS:
        for function, message in functions:
            with pytest.raises(KeyError, match=message) as info:
                call(1, async_execution(function))
            assert "On WorkerInfo(id=1, name=worker1)" in str(info.value.__cause__)
        for value in (5, None, "future"):
            with pytest.raises(RuntimeError, match=ALREADY):
                call(1, Later(1).no_future, (value,))
    with pytest.raises(RuntimeError, match=r"Can not pickle torch\.futures\.Future"):
        rpc.rpc_sync(1, async_execution(lambda: done(torch.futures.Future())))


@torch.jit.script
def _scripted(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@async_execution
def forks(x: torch.Tensor) -> Any:
    return torch.jit.fork(_scripted, x)


@async_execution
@torch.jit.script
def decorated(x: torch.Tensor) -> torch.jit.Future[torch.Tensor]:
    return torch.jit.fork(_scripted, x)


def test_torch_script(shared: Mesh) -> None:
    for func in (forks, decorated):
        assert rpc.rpc_sync(1, func, (torch.ones(1),)) == torch.tensor([2.0])
    assert rpc.rpc_sync(1, echo, (decorated,)) is decorated  # by its name
    assert decorated(torch.ones(1)).wait() == 2


class Argument:
    """Goes when the handler that was called with it has returned."""


class _Held:
    """What a handler leaves for the test."""

    script: weakref.ref[Any]
    future: torch.futures.Future[Any]
    returned: threading.Event


@async_execution
def hold(script: Any, argument: Argument) -> Any:
    weakref.finalize(argument, _Held.returned.set)
    _Held.script, _Held.future = weakref.ref(script), torch.futures.Future()
    return _Held.future


@ways
def test_a_script_that_came_stays_until_the_future_is_done(shared: Mesh, call: Call) -> None:
    """What it has forked runs on meanwhile, and needs its code."""
    _Held.returned = threading.Event()

    def call_with_script() -> Any:
        return call(1, hold, (torch.jit.script(torch.nn.Identity()), Argument()))

    answer = shared.submit(0, call_with_script)
    assert _Held.returned.wait(SOON)
    gc.collect()
    there = _Held.script() is not None
    _Held.future.set_result(3)
    assert answer.result(SOON) == 3
    assert there
    until(lambda: _Held.script() is None, "the script is still there after the answer")


_parked: list[Any] = emptied([])


@async_execution
def park() -> Any:
    _parked.append(torch.futures.Future())
    return _parked[-1]


@ONE_THREAD
def test_many_can_be_in_progress_with_one_thread(caller: Mesh) -> None:
    futures = [rpc.rpc_async(1, park) for _ in range(50)]
    # Calls of one worker begin in their order, and the one thread has begun all of them.
    assert rpc.rpc_sync(1, here(lambda: len(_parked))) == 50
    assert not any(f.done() for f in futures)
    for i, future in enumerate(reversed(_parked)):
        future.set_result(i)
    assert torch.futures.wait_all(futures) == list(reversed(range(50)))


# -- async def -----------------------------------------------------------------------------------


async def double(x: int) -> int:
    await asyncio.sleep(0)
    return 2 * x


async def call_further(to: int, x: int) -> int:
    return await rpc.rpc_async(to, double, (x,)) + 1


async def fail_later(error: BaseException) -> None:
    await asyncio.sleep(0)
    raise error


@ways
def test_async_def(shared: Mesh, call: Call) -> None:
    for to in (0, 1):
        assert call(to, double, (4,)) == 8
        assert call(to, double, kwargs={"x": 5}) == 10
        assert call(to, Later(3).coroutine, (4,)) == 7
        assert call(1, call_further, (to, 4)) == 9
    with pytest.raises(KeyError) as info:
        call(1, fail_later, (KeyError("k"),))
    assert info.value.args == ("k",)
    assert "fail_later" in str(info.value.__cause__)
    with pytest.raises(rpc.RemoteError, match="CancelledError"):
        call(1, fail_later, (asyncio.CancelledError(),), timeout=5)


async def stop_the_loop() -> str:
    asyncio.get_running_loop().stop()
    return "stopped"


_event = asyncio.Event()


async def wait_for_event() -> str:
    await asyncio.wait_for(_event.wait(), SOON)
    return "was set"


async def set_event() -> None:
    _event.set()


@pytest.mark.zrpc(timeout=15)
def test_coroutines_of_one_worker_can_meet_also_if_one_stops_their_loop(caller: Mesh) -> None:
    """The worker shuts down as ever: the fixture sees to that."""
    waiting = [rpc.rpc_async(1, wait_for_event) for _ in range(30)]
    assert rpc.rpc_sync(1, stop_the_loop, timeout=5) == "stopped"
    rpc.rpc_sync(1, set_event, timeout=5)
    assert torch.futures.wait_all(waiting) == ["was set"] * 30


async def blocks(gate: Gate) -> None:
    gate.wait_inside()


def test_a_coroutine_that_blocks_its_loop_holds_up_no_other_calls(shared: Mesh, gate: Gate) -> None:
    blocked = rpc.rpc_async(1, blocks, (gate,))
    gate.await_entry()
    assert rpc.rpc_sync(1, echo, (1,)) == 1
    assert rpc.rpc_sync(1, already_done, (2,)) == 2
    gate.open()
    assert blocked.wait() is None

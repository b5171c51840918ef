"""Handlers that answer later, by a future: async_execution."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import zrpc as rpc
from tests.support.later import Later, already_done
from tests.support.targets import echo, fail
from tests.support.waiting import SOON, until
from tests.support.ways import WAYS, Call, ways
from zrpc.functions import async_execution
from zrpc.testing import Mesh

ALREADY = "Functions decorated with @rpc.async_function must return a torch.futures.Future object,"


@async_execution
def add_on(to: int, x: int, y: int, z: int = 0) -> Any:
    return rpc.rpc_async(to, sum, ([x, y],)).then(lambda f: f.wait() + z)


@async_execution
def failed_already() -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_exception(KeyError("set"))
    return future


@async_execution
def done_here() -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result((threading.get_ident(), PackedBy()))
    return future


@async_execution
def fails_at_once() -> Any:
    raise KeyError("at once")


@async_execution
def fails_in_then() -> Any:
    return rpc.rpc_async(0, echo, (1,)).then(lambda f: fail(KeyError("in then")))


@async_execution
def fails_over_there() -> Any:
    return rpc.rpc_async(0, fail, (KeyError("over there"),))


@async_execution
def no_future(value: Any) -> Any:
    return value


@async_execution
def future_of_future() -> Any:
    return rpc.rpc_async(0, echo, (1,)).then(lambda f: torch.futures.Future())


@ways
def test_answers_with_the_futures_value(shared: Mesh, call: Call) -> None:
    assert call(1, add_on, (0, 1, 2, 3)) == 6
    assert call(1, add_on, (1, 1, 2), {"z": 4}) == 7
    assert call(0, add_on, (0, 1, 2, 3)) == 6
    assert call(1, already_done, ("x",)) == "x"


class PackedBy:
    """Arrives as the thread that packs it."""

    def __reduce__(self) -> Any:
        return int, (threading.get_ident(),)


def test_a_future_that_is_done_takes_no_other_thread(shared: Mesh) -> None:
    for _ in range(20):
        ran, packed = rpc.rpc_sync(1, done_here)
        assert ran == packed


def test_errors(shared: Mesh) -> None:
    for func, message in (
        (failed_already, "set"),
        (fails_at_once, "at once"),
        (fails_in_then, "in then"),
        (fails_over_there, "over there"),
    ):
        for call in WAYS:
            with pytest.raises(KeyError, match=message) as info:
                call(1, func)
            assert "On WorkerInfo(id=1, name=worker1)" in str(info.value.__cause__)


def test_without_a_future(shared: Mesh) -> None:
    for call in WAYS:
        for value in (5, None, "future"):
            with pytest.raises(RuntimeError, match=ALREADY):
                call(1, no_future, (value,))
    with pytest.raises(RuntimeError, match=ALREADY):
        rpc.rpc_sync(1, Later(1).no_future)
    with pytest.raises(RuntimeError, match=r"Can not pickle torch\.futures\.Future"):
        rpc.rpc_sync(1, future_of_future)


def test_methods(shared: Mesh) -> None:
    for call in WAYS:
        assert call(1, Later(5).method, (0, 1)) == 6
        assert call(1, Later.static, (0, 1)) == 2
        assert call(1, Later(5).static, (0, 1)) == 2
        assert call(1, Later.of_class, (0, 1)) == ("Later", 1)
        assert call(1, Later.method, (Later(7), 0, 1)) == 8


def test_through_rref_proxies(shared: Mesh) -> None:
    rref = rpc.remote(1, Later, (10,))
    assert rref.rpc_sync().method(0, 1) == 11
    assert rref.rpc_async().method(0, 2).wait() == 12
    assert rref.remote().method(0, 3).to_here() == 13
    assert rref.rpc_sync().static(0, 4) == 5
    assert rref.rpc_sync().of_class(0, 5) == ("Later", 5)
    with pytest.raises(RuntimeError, match=ALREADY):
        rref.rpc_sync().no_future()
    assert rref.rpc_sync().coroutine(1) == 11
    assert rref.rpc_async().coroutine(2).wait() == 12
    assert rref.remote().coroutine(3).to_here() == 13


def test_on_a_local_function(shared: Mesh) -> None:
    offset = 100

    @async_execution
    def local(x: int) -> Any:
        return rpc.rpc_async(0, echo, (x,)).then(lambda f: f.wait() + offset)

    assert rpc.rpc_sync(1, local, (1,)) == 101


@torch.jit.script
def _scripted(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@torch.jit.script
def _forks(x: torch.Tensor) -> torch.jit.Future[torch.Tensor]:
    return torch.jit.fork(_scripted, x)


script_later = async_execution(_forks)


@async_execution
def forks(x: torch.Tensor) -> Any:
    return torch.jit.fork(_scripted, x)


@async_execution
@torch.jit.script
def decorated(x: torch.Tensor) -> torch.jit.Future[torch.Tensor]:
    return torch.jit.fork(_scripted, x)


class Scripts:
    @staticmethod
    @async_execution
    @torch.jit.script
    def decorated(x: torch.Tensor) -> torch.jit.Future[torch.Tensor]:
        return torch.jit.fork(_scripted, x)


def test_torch_script(shared: Mesh) -> None:
    for func in (forks, script_later, decorated, Scripts.decorated):
        assert rpc.rpc_sync(1, func, (torch.ones(1),)) == torch.tensor([2.0])
    for func in (decorated, Scripts.decorated):
        assert rpc.rpc_sync(1, echo, (func,)) is func  # by its name
        assert func(torch.ones(1)).wait() == 2


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


def call_with_script(mesh: Mesh, call: Call) -> Any:
    with mesh.agent(0).as_current():
        return call(1, hold, (torch.jit.script(torch.nn.Identity()), Argument()))


@ways
def test_a_script_that_came_stays_until_the_future_is_done(shared: Mesh, call: Call) -> None:
    """What it has forked runs on meanwhile, and needs its code."""
    _Held.returned = threading.Event()
    with ThreadPoolExecutor(1) as executor:
        answer = executor.submit(call_with_script, shared, call)
        assert _Held.returned.wait(SOON)
        gc.collect()
        there = _Held.script() is not None
        _Held.future.set_result(3)
        assert answer.result(SOON) == 3
    assert there
    until(lambda: _Held.script() is None, "the script is still there after the answer")


def test_the_decorated_function_can_be_called_here(shared: Mesh) -> None:
    assert add_on(1, 1, 2, 3).wait() == 6
    assert add_on.__name__ == "add_on"
    assert hasattr(add_on, "_wrapped_async_rpc_function")  # as torch marks it


# -- no thread is held -----------------------------------------------------------------------


_parked: list[Any] = []


@async_execution
def park() -> Any:
    _parked.append(torch.futures.Future())
    return _parked[-1]


def parked() -> int:
    return len(_parked)


@pytest.mark.zrpc(options={"num_worker_threads": 1})
def test_many_can_be_in_progress_with_one_thread(caller: Mesh) -> None:
    _parked.clear()
    futures = [rpc.rpc_async(1, park) for _ in range(50)]
    # Calls of one worker begin in their order, and the one thread has begun all of them.
    assert rpc.rpc_sync(1, parked) == 50
    assert not any(f.done() for f in futures)
    for i, future in enumerate(reversed(_parked)):
        future.set_result(i)
    assert torch.futures.wait_all(futures) == list(reversed(range(50)))

"""Methods of the value, called through an RRef."""

from __future__ import annotations

import asyncio
import copy
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import zrpc
from tests.services.rref.tracked import (
    SOON,
    Value,
    is_freed,
)
from tests.support.identity import event
from tests.support.waiting import until
from zrpc.testing import Mesh


class Counter:
    """What the proxies call."""

    attribute = 5

    def __init__(self, start: int = 0) -> None:
        self.count = start

    def add(self, number: Any, twice: bool = False) -> Any:
        self.count += 2 * number if twice else number
        return self.count

    def where(self) -> Any:
        return zrpc.get_worker_info().name

    def wait_for(self, name: Any) -> Any:
        assert event(name).wait(SOON)
        return name

    def fail(self) -> None:
        raise LookupError("not here", 7)

    def __call__(self, number: Any) -> Any:
        return number + 1

    def __getitem__(self, key: Any) -> Any:
        return f"item {key}"

    def __len__(self) -> Any:
        return 3

    @staticmethod
    def static(number: Any) -> Any:
        return number * 2

    @classmethod
    def of_class(cls) -> Any:
        return cls.__name__

    @zrpc.functions.async_execution
    def later(self, to: Any, number: Any) -> Any:
        return zrpc.rpc_async(to, torch.add, args=(torch.ones(1), number)).then(
            lambda future: future.wait() + self.count
        )

    @staticmethod
    @zrpc.functions.async_execution
    def static_later(to: Any, number: Any) -> Any:
        return zrpc.rpc_async(to, max, args=(number, 3))

    @classmethod
    @zrpc.functions.async_execution
    def class_later(cls, to: Any, number: Any) -> Any:
        return zrpc.rpc_async(to, max, args=(number, 4))

    @zrpc.functions.async_execution
    def forgets_its_future(self) -> Any:
        return 5

    async def soon(self, to: Any, number: Any) -> Any:
        await asyncio.sleep(0)
        return await zrpc.rpc_async(to, max, args=(number, self.count))

    def of_name(self, name: Any) -> Any:
        return getattr(self, name)


def by_sync(rref: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
    return getattr(rref.rpc_sync(), name)(*args, **kwargs)


def by_async(rref: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
    future = getattr(rref.rpc_async(), name)(*args, **kwargs)
    assert isinstance(future, torch.futures.Future)
    return future.wait()


def by_remote(rref: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
    result = getattr(rref.remote(), name)(*args, **kwargs)
    assert isinstance(result, zrpc.RRef)
    assert result.owner() == rref.owner()
    return result.to_here()


@pytest.fixture(params=[by_sync, by_async, by_remote])
def call(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(params=["worker1", "worker0"])
def counter(request: pytest.FixtureRequest, mesh: Mesh) -> Iterator[Any]:
    """An RRef of worker0's to a Counter on another worker, or on itself."""
    rref = mesh.run(0, zrpc.remote, request.param, Counter, args=(10,))
    yield rref
    event("go").set()


def test_methods_run_at_the_owner(mesh: Mesh, counter: Any, call: Any) -> None:
    assert mesh.run(0, call, counter, "where") == counter.owner_name()
    assert mesh.run(0, call, counter, "add", 1) == 11
    assert mesh.run(0, call, counter, "add", 2, twice=True) == 15
    assert mesh.run(0, call, counter, "add", number=1) == 16


def test_a_proxy_is_called_as_its_value(caller: Mesh, counter: Any) -> None:
    assert counter.rpc_sync()(4) == 5
    assert counter.rpc_async()(number=4).wait() == 5
    assert counter.remote()(4).to_here() == 5
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        counter.rpc_sync()()


def test_functions_and_classes_are_called_by_their_proxy(caller: Mesh) -> None:
    for value, argument, result in ((len, "abc", 3), (Counter, 7, Counter), (lambda x: -x, 2, -2)):
        rref = zrpc.remote("worker1", itself, args=(value,))
        found = rref.rpc_sync()(argument)
        assert found == result or type(found) is result


def itself(value: Any) -> Any:
    return value


def test_a_value_that_can_not_be_called_is_a_type_error(caller: Mesh) -> None:
    rref = zrpc.remote("worker1", int, args=(3,))
    for call in (
        lambda: rref.rpc_sync()(1),
        lambda: rref.rpc_async()(1).wait(),
        lambda: rref.remote()(1),
    ):
        with pytest.raises(TypeError, match="'int' object is not callable"):
            call()


def test_async_execution(mesh: Mesh, counter: Any, call: Any) -> None:
    assert mesh.run(0, call, counter, "later", "worker0", 2).tolist() == [13]
    assert mesh.run(0, call, counter, "static_later", "worker0", 2) == 3
    assert mesh.run(0, call, counter, "class_later", "worker0", 2) == 4
    with pytest.raises(
        RuntimeError,
        match=re.escape(
            "Functions decorated with @rpc.async_function must return a torch.futures.Future object"
        ),
    ):
        mesh.run(0, call, counter, "forgets_its_future")


def test_async_def(mesh: Mesh, counter: Any, call: Any) -> None:
    assert mesh.run(0, call, counter, "soon", "worker0", 20) == 20
    assert mesh.run(0, call, counter, "soon", "worker0", 2) == 10


def test_errors_have_their_own_type(mesh: Mesh, counter: Any, call: Any) -> None:
    with pytest.raises(LookupError) as caught:
        mesh.run(0, call, counter, "fail")
    assert type(caught.value) is LookupError
    assert caught.value.args == ("not here", 7)


def test_a_missing_attribute_is_reported_at_the_call(caller: Mesh, counter: Any) -> None:
    with pytest.raises(AttributeError, match="nothing_like_it"):
        counter.rpc_sync().nothing_like_it()
    with pytest.raises(AttributeError, match="nothing_like_it"):
        counter.remote().nothing_like_it()
    future = counter.rpc_async().nothing_like_it()
    with pytest.raises(AttributeError, match="nothing_like_it"):
        future.wait()


def test_an_attribute_that_is_no_function(mesh: Mesh, counter: Any, call: Any) -> None:
    with pytest.raises(TypeError, match="'int' object is not callable"):
        mesh.run(0, call, counter, "attribute")


@pytest.mark.parametrize("by", ["rpc_sync", "rpc_async"])
def test_a_proxy_has_a_timeout(mesh: Mesh, counter: Any, by: str) -> None:
    def wait() -> None:
        result = getattr(counter, by)(timeout=0.05).wait_for("go")
        result.wait()

    def at_user() -> None:
        with pytest.raises(zrpc.RpcTimeoutError, match=re.escape("timeout (50 ms)")):
            wait()
        event("go").set()
        assert counter.rpc_sync(0.0).wait_for("go") == "go"
        assert counter.rpc_sync(timeout=SOON).wait_for("go") == "go"

    mesh.run(0, at_user)


def test_a_remote_proxy_has_a_timeout(caller: Mesh) -> None:
    counter = zrpc.remote("worker1", Counter)
    event("before").set()
    counter.remote().wait_for("before").to_here()  # its name is known from now on
    result = counter.remote(timeout=0.05).wait_for("go")
    until(lambda: has_timed_out(result), "the call has timed out")
    event("go").set()


def has_timed_out(rref: Any) -> Any:
    try:
        rref.to_here(timeout=0.01)
    except zrpc.RpcTimeoutError as error:
        return "RRef creation via rpc.remote() timed out" in str(error)
    return False


def test_calls_wait_for_a_value_that_is_still_being_made(caller: Mesh) -> None:
    rref = zrpc.remote("worker1", make_when, args=("go",))
    futures = [rref.rpc_async().add(1) for _ in range(3)]
    derived = rref.remote(timeout=0)
    assert not any(future.done() for future in futures)
    event("go").set()
    assert sorted(torch.futures.wait_all(futures)) == [1, 2, 3]
    assert derived.add(1).to_here() == 4


def make_when(name: Any) -> Any:
    assert event(name).wait(SOON)
    return Counter()


def test_rrefs_of_results_live_on_their_own(mesh: Mesh) -> None:
    def at_user() -> Any:
        value = zrpc.remote("worker1", Value, args=("first",))
        other = value.remote().make("second")
        del value
        assert other.rpc_sync().get_key() == "second"
        return other

    other = mesh.run(0, at_user)
    assert is_freed("first")
    assert mesh.run(0, by_sync, other, "get_key") == "second"
    del other
    assert is_freed("second")


# -- proxies as values ---------------------------------------------------------------------------

WAYS = ["rpc_sync", "rpc_async", "remote"]


def value_of(result: Any) -> Any:
    """Returns the value of what a method of a proxy has returned."""
    if isinstance(result, zrpc.Future):
        return result.wait()
    return result.to_here() if isinstance(result, zrpc.RRef) else result


def add_by(proxy: Any, number: int) -> Any:
    return value_of(proxy.add(number)), zrpc.get_worker_info().name


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda p: copy.deepcopy([p])[0]])
def test_a_copy_of_a_proxy_calls_the_same_value(counter: Any, way: str, copied: Any) -> None:
    proxy = getattr(counter, way)()
    assert value_of(copied(proxy).add(2)) == 12
    assert value_of(proxy.add(2)) == 14


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("to", ["worker0", "worker1"])
def test_a_proxy_that_is_sent_calls_the_same_value(
    mesh: Mesh, counter: Any, way: str, to: str
) -> None:
    proxy = getattr(counter, way)(timeout=20)
    assert mesh.run(0, zrpc.rpc_sync, to, add_by, args=(proxy, 3)) == (13, to)
    assert mesh.run(0, zrpc.rpc_sync, to, lambda: value_of(proxy.add(4))) == 17


def test_a_proxy_has_special_methods_of_operators_and_none_that_libraries_ask_for(
    counter: Any,
) -> None:
    proxy = counter.rpc_sync()
    assert proxy.__getitem__(4) == "item 4"
    assert proxy.__len__() == 3
    names = ["__array__", "__torch_function__", "__wrapped__", "__code__", "__setstate__"]
    assert [name for name in names if hasattr(proxy, name)] == []
    assert vars(proxy) == {}
    assert inspect.unwrap(proxy) is proxy
    with pytest.raises(AttributeError, match="has no attribute '__array__'"):
        proxy.__array__()

"""Methods of the value, called through an RRef."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import zrpc
from tests.services.rref.tracked import Value, has_timed_out, is_freed
from tests.support.identity import event
from tests.support.waiting import SOON, until
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


WAYS = ["rpc_sync", "rpc_async", "remote"]


def value_of(result: Any) -> Any:
    """Returns the value of what a method of a proxy has returned."""
    if isinstance(result, zrpc.Future):
        return result.wait()
    return result.to_here() if isinstance(result, zrpc.RRef) else result


@pytest.fixture(params=["worker1", "worker0"])
def counter(request: pytest.FixtureRequest, caller: Mesh) -> Iterator[Any]:
    """An RRef of worker0's to a Counter on another worker, or on itself."""
    yield zrpc.remote(request.param, Counter, args=(10,))
    event("go").set()


@pytest.mark.parametrize("way", WAYS)
def test_methods_of_all_kinds_run_at_the_owner(counter: Any, way: str) -> None:
    def call(name: str, *args: Any, **kwargs: Any) -> Any:
        return value_of(getattr(getattr(counter, way)(), name)(*args, **kwargs))

    assert call("where") == counter.owner_name()
    assert [call("add", 1), call("add", 2, twice=True), call("add", number=1)] == [11, 15, 16]
    result = getattr(counter, way)()(number=4)  # of the value itself
    assert value_of(result) == 5
    assert way != "remote" or result.owner() == counter.owner()
    with pytest.raises(LookupError) as caught:
        call("fail")
    assert type(caught.value) is LookupError
    assert caught.value.args == ("not here", 7)
    with pytest.raises(TypeError, match="'int' object is not callable"):
        call("attribute")
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        call("__call__")


def test_functions_and_classes_are_called_by_their_proxy(caller: Mesh) -> None:
    for value, argument, result in ((len, "abc", 3), (Counter, 7, Counter), (lambda x: -x, 2, -2)):
        rref = zrpc.remote("worker1", lambda value: value, args=(value,))
        found = rref.rpc_sync()(argument)
        assert found == result or type(found) is result


def test_what_a_value_has_not_is_reported_at_the_call(caller: Mesh) -> None:
    number = zrpc.remote("worker1", int, args=(3,))
    for call in (
        lambda: number.rpc_sync()(1),
        lambda: number.rpc_async()(1).wait(),
        lambda: number.remote()(1),
    ):
        with pytest.raises(TypeError, match="'int' object is not callable"):
            call()
    with pytest.raises(AttributeError, match="nothing_like_it"):
        number.rpc_sync().nothing_like_it()
    with pytest.raises(AttributeError, match="nothing_like_it"):
        number.remote().nothing_like_it()
    future = number.rpc_async().nothing_like_it()
    with pytest.raises(AttributeError, match="nothing_like_it"):
        future.wait()


def test_a_proxy_has_a_timeout(counter: Any) -> None:
    with pytest.raises(zrpc.RpcTimeoutError, match=re.escape("timeout (50 ms)")):
        counter.rpc_sync(timeout=0.05).wait_for("go")
    with pytest.raises(zrpc.RpcTimeoutError, match=re.escape("timeout (50 ms)")):
        counter.rpc_async(timeout=0.05).wait_for("go").wait()
    event("before").set()
    counter.remote().wait_for("before").to_here()  # its name is known from now on
    late = counter.remote(timeout=0.05).wait_for("go")
    until(lambda: has_timed_out(late))
    event("go").set()
    assert counter.rpc_sync(0.0).wait_for("go") == "go"
    assert counter.rpc_sync(timeout=SOON).wait_for("go") == "go"


def test_calls_wait_for_a_value_that_is_still_being_made(caller: Mesh) -> None:
    def make() -> Any:
        assert event("go").wait(SOON)
        return Counter()

    rref = zrpc.remote("worker1", make)
    futures = [rref.rpc_async().add(1) for _ in range(3)]
    derived = rref.remote(timeout=0)
    assert not any(future.done() for future in futures)
    event("go").set()
    assert sorted(torch.futures.wait_all(futures)) == [1, 2, 3]
    assert derived.add(1).to_here() == 4


def test_rrefs_of_results_live_on_their_own(caller: Mesh) -> None:
    value = zrpc.remote("worker1", Value, args=("first",))
    other = value.remote().make("second")
    del value
    assert other.rpc_sync().get_key() == "second"
    assert is_freed("first")
    assert other.rpc_sync().get_key() == "second"
    del other
    assert is_freed("second")


# -- proxies as values ---------------------------------------------------------------------------


def add_by(proxy: Any, number: int) -> Any:
    return value_of(proxy.add(number)), zrpc.get_worker_info().name


def test_a_proxy_that_is_copied_or_sent_calls_the_same_value(counter: Any) -> None:
    count = 10
    for way in WAYS:
        proxy = getattr(counter, way)(timeout=20)
        for copied in (copy.copy(proxy), copy.deepcopy([proxy])[0]):
            assert value_of(copied.add(1)) == (count := count + 1)
        for to in ("worker0", "worker1"):
            assert zrpc.rpc_sync(to, add_by, args=(proxy, 3)) == (count := count + 3, to)
            found = zrpc.rpc_sync(to, lambda proxy=proxy: value_of(proxy.add(4)))
            assert found == (count := count + 4)


def test_a_proxy_has_special_methods_of_operators_and_none_that_libraries_ask_for(
    caller: Mesh,
) -> None:
    proxy: Any = zrpc.remote("worker1", Counter).rpc_sync()
    assert proxy.__getitem__(4) == "item 4"
    assert proxy.__len__() == 3
    names = ["__array__", "__torch_function__", "__wrapped__", "__code__", "__setstate__"]
    assert [name for name in names if hasattr(proxy, name)] == []
    assert vars(proxy) == {}
    assert inspect.unwrap(proxy) is proxy
    with pytest.raises(AttributeError, match="has no attribute '__array__'"):
        proxy.__array__()

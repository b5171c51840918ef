"""rpc_sync, rpc_async and remote: who is called, with what, and what comes back."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch

import zrpc as rpc
from tests.support.gates import Gate
from tests.support.targets import echo
from tests.support.ways import Call, ways
from zrpc.testing import Mesh


def whoami() -> rpc.WorkerInfo:
    return rpc.get_worker_info()


@ways
def test_destinations(shared: Mesh, call: Call) -> None:
    for name, rank in (("worker1", 1), ("worker0", 0)):
        for to in (name, rank, rpc.WorkerInfo(name, rank)):
            assert call(to, whoami) == rpc.WorkerInfo(name, rank)
    for to in ("nobody", "", 99, -1, 2, rpc.WorkerInfo("worker1", 0)):
        with pytest.raises(RuntimeError, match="could not find destination"):
            call(to, whoami)
    for to in (1.0, None, b"worker1", ["worker1"]):
        with pytest.raises(ValueError, match=r"."):
            call(to, whoami)


@ways
def test_what_is_not_callable(shared: Mesh, call: Call) -> None:
    for func in (None, 5, "add", torch.ones(1)):
        with pytest.raises(TypeError, match=r"function should be callable\."):
            call("worker1", func)


@ways
def test_args_and_kwargs(shared: Mesh, call: Call) -> None:
    assert call(1, echo, args=(1, "two"), kwargs={"three": [3], "four": None}) == (
        (1, "two"),
        {"three": [3], "four": None},
    )
    assert call(1, int, kwargs={}) == 0
    assert call(1, dict, kwargs={"a": 1}) == {"a": 1}
    for args in (None, (), []):
        assert call(1, list, args=args) == []


def test_names_of_parameters_may_be_those_of_the_call(shared: Mesh) -> None:
    def named(to: int, func: int, timeout: int) -> tuple[int, int, int]:
        return to, func, timeout

    assert rpc.rpc_sync(1, named, kwargs={"to": 1, "func": 2, "timeout": 3}) == (1, 2, 3)
    assert rpc.rpc_sync(1, operator.add, [1, 2]) == 3  # type: ignore[arg-type]


VALUES: list[Any] = [
    *(None, True, 2**200, -0.0, 1j, "é\0\ud800", range(5), slice(1, None, 2), Ellipsis, int),
    *(b"\0" * 100_000, bytearray(b"x" * 100_000), "y" * 1_000_000),
    *({1: {2: {3: (4, frozenset({5}))}}}, [[]] * 3),
    *(torch.Size([1, 2]), torch.float16, torch.device("cpu")),
    *("__main__", b"a pickle that mentions __main__"),
]


def test_values_come_back_as_they_went(shared: Mesh) -> None:
    for value in VALUES:
        back = rpc.rpc_sync(1, echo, (value,))
        assert back == value
        assert type(back) is type(value)


def test_one_object_twice_is_one_object_on_arrival(shared: Mesh) -> None:
    value = {"a": 1}
    one, two = rpc.rpc_sync(1, echo, (value, value))
    assert one is two
    assert one is not value


def append(values: list[Any], value: Any) -> list[Any]:
    values.append(value)
    return values


def returned_and_kept() -> list[int]:
    return _kept


_kept = [1]


@ways
def test_arguments_and_results_are_copies(shared: Mesh, call: Call) -> None:
    for to in (0, 1):
        values: list[Any] = [1]
        assert call(to, append, (values, 2)) == [1, 2]
        assert values == [1]
        rpc.rpc_sync(to, returned_and_kept).append(2)
        assert _kept == [1]


def test_rpc_async_and_remote_return_before_the_function_does(shared: Mesh, gate: Gate) -> None:
    future = rpc.rpc_async(1, gate.wait_inside, ("a",))
    rref = rpc.remote(1, gate.wait_inside, ("b",))
    gate.await_entry(2)
    assert not future.done()
    gate.open()
    assert (future.wait(), rref.to_here()) == ("a", "b")


@pytest.mark.system
@pytest.mark.zrpc(options={"num_worker_threads": 2})
def test_no_more_handlers_run_than_there_are_worker_threads(caller: Mesh, gate: Gate) -> None:
    held = [rpc.rpc_async(0, gate.work_inside) for _ in range(2)]
    gate.await_entry(2)
    late = rpc.rpc_async(0, gate.wait_inside)
    assert not gate.entered.acquire(timeout=0.5)
    gate.open()
    assert [f.wait() for f in [*held, late]] == [None] * 3

"""rpc_sync, rpc_async and remote: who is called, with what, and what comes back."""

from __future__ import annotations

import operator
import pickle
import threading
from collections.abc import Callable
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


def test_handlers_run_side_by_side(shared: Mesh) -> None:
    futures = [rpc.rpc_async(1, meet_at_barrier) for _ in range(4)]
    assert sorted(f.wait() for f in futures) == [0, 1, 2, 3]


_barrier = threading.Barrier(4)


def meet_at_barrier() -> int:
    return _barrier.wait(20)


@pytest.mark.system
@pytest.mark.zrpc(options={"num_worker_threads": 2})
def test_no_more_handlers_run_than_there_are_worker_threads(caller: Mesh, gate: Gate) -> None:
    held = [rpc.rpc_async(0, gate.work_inside) for _ in range(2)]
    gate.await_entry(2)
    late = rpc.rpc_async(0, gate.wait_inside)
    assert not gate.entered.acquire(timeout=0.5)
    gate.open()
    assert [f.wait() for f in [*held, late]] == [None] * 3


# -- who is who ------------------------------------------------------------------------------


@pytest.mark.zrpc(workers=3)
def test_get_worker_info(caller: Mesh) -> None:
    assert rpc.get_worker_info() == rpc.WorkerInfo("worker0", 0)
    for rank in range(3):
        info = rpc.get_worker_info(f"worker{rank}")
        assert (info.name, info.id) == (f"worker{rank}", rank)
        assert rpc.rpc_sync(info, rpc.get_worker_info) == info
    with pytest.raises(RuntimeError, match="nobody"):
        rpc.get_worker_info("nobody")


def test_worker_info_is_a_value() -> None:
    info = rpc.WorkerInfo("w1", 1)
    assert info == rpc.WorkerInfo("w1", 1)
    assert info != rpc.WorkerInfo("w1", 2)
    assert info != rpc.WorkerInfo("w2", 1)
    assert len({info, rpc.WorkerInfo("w1", 1), rpc.WorkerInfo("w2", 2)}) == 2
    assert pickle.loads(pickle.dumps(info)) == info
    assert repr(info) == "WorkerInfo(id=1, name=w1)"
    with pytest.raises(AttributeError):
        info.name = "w2"  # type: ignore[misc]


def test_names_that_are_allowed_and_others() -> None:
    for name in ("a", "A-b_c:9", "x" * 127, "0", ":", "-"):
        assert rpc.WorkerInfo(name, 0).name == name
    for name in ("", "x" * 128, "a b", "a.b", "a/b", "é", "a\n", "\n", "a\0"):
        text = r"Worker name must match .* must be non-empty and shorter than 128 chars, but got"
        with pytest.raises(RuntimeError, match=text):
            rpc.WorkerInfo(name, 0)


def test_two_meshes_in_one_process_do_not_mix(make_mesh: Callable[..., Mesh]) -> None:
    first, second = make_mesh(workers=2), make_mesh(workers=3)
    assert first.run(0, rpc.rpc_sync, 1, whoami) == second.run(0, rpc.rpc_sync, 1, whoami)
    assert second.run(0, rpc.rpc_sync, 2, whoami).id == 2
    with pytest.raises(RuntimeError, match="could not find destination"):
        first.run(0, rpc.rpc_sync, 2, whoami)
    assert first.run(0, rpc.rpc_sync, 1, agent_number) == id(first.agent(1))
    assert second.run(0, rpc.rpc_sync, 1, agent_number) == id(second.agent(1))
    # A call on to the next from inside a handler stays in its mesh too.
    assert second.run(0, rpc.rpc_sync, 1, call_on, (2,)) == id(second.agent(2))
    first.shutdown()
    assert second.run(0, rpc.rpc_sync, 1, agent_number) == id(second.agent(1))


def agent_number() -> int:
    from zrpc.agent.current import current_agent

    return id(current_agent())


def call_on(to: int) -> int:
    return rpc.rpc_async(to, agent_number).wait()


def test_before_init() -> None:
    for use in (
        lambda: rpc.rpc_sync("worker1", max),
        lambda: rpc.rpc_async("worker1", max),
        lambda: rpc.remote("worker1", max),
        rpc.get_worker_info,
        lambda: rpc.get_worker_info("worker1"),
        lambda: rpc.on_worker_lost(print),
        lambda: rpc.on_worker_joined(print),
        rpc.shutdown,
    ):
        with pytest.raises(rpc.NotInitializedError, match=r"^RPC has not been initialized"):
            use()
    for use in (lambda: rpc.RRef(1), rpc.get_rpc_timeout, lambda: rpc.api._set_rpc_timeout(1)):
        message = r"Current RPC agent is not set! Did you initialize the RPC framework"
        with pytest.raises(RuntimeError, match=message):
            use()


def test_whether_there_is_an_agent(shared: Mesh) -> None:
    assert rpc._is_current_rpc_agent_set()
    assert rpc.rpc_sync(1, rpc._is_current_rpc_agent_set)
    found: list[bool] = []
    # The agents of a mesh of threads are not the process's.
    thread = threading.Thread(target=lambda: found.append(rpc._is_current_rpc_agent_set()))
    thread.start()
    thread.join()
    assert found == [False]


def test_is_available() -> None:
    assert rpc.is_available() is True

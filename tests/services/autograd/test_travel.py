"""The ways to call, and what tensors are in: they are part of the graph however they travel."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import zrpc
import zrpc.autograd as dist_autograd
from tests.services.autograd.split_models import (
    W,
    X,
    assert_freed,
    gradients_at,
    layer,
    train,
)
from tests.support.waiting import SOON
from zrpc.testing import Mesh
from zrpc.testing.plugin import MakeMesh

pytestmark = pytest.mark.zrpc(workers=3, timeout=60)


def both(x: Any) -> Any:
    return layer(1, x)


EXPECTED = torch.autograd.grad((both(X.sin()) * 2).sum(), [X, W[1]])


def assert_expected(mesh: Mesh, model: Any, to: int = 1) -> None:
    """The model must be ``both(X.sin())`` in some way."""

    def run() -> Any:
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [(model(X.sin()) * 2).sum()])
            return [gradients_at(mesh, rank, context_id) for rank in range(3)]

    found = mesh.run(0, run)
    torch.testing.assert_close([found[0][X], found[to][W[1]]], list(EXPECTED))
    assert X.grad is None
    assert W[1].grad is None
    assert_freed(mesh)


class Carrier:
    """An object of a user that holds a tensor."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def both(self) -> Any:
        return both(self.x)


class Module(torch.nn.Module):
    """What an RRef refers to; it stays where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()  # can't be pickled

    def forward(self, x: Any) -> Any:
        return both(x)

    def stored(self, x: Any) -> None:
        self.kept = both(x)

    def load(self) -> Any:
        return self.kept

    async def later(self, x: Any) -> Any:
        return both(x)

    @zrpc.functions.async_execution
    def async_(self, x: Any) -> Any:
        future = torch.futures.Future()
        future.set_result(both(x))
        return future


def module() -> zrpc.RRef[Any]:
    return zrpc.remote("worker1", Module)


def kept_between_calls(x: Any) -> Any:
    there = module()
    there.rpc_sync().stored(x)
    return there.rpc_sync().load()


def use_rref(rref: Any) -> Any:
    return both(rref.to_here())


def make_rref(x: Any) -> Any:
    return zrpc.RRef(both(x))


def fetched_twice(x: Any) -> Any:
    rref = zrpc.remote("worker1", both, (x,))
    return (rref.to_here() + rref.to_here()) / 2


async def suspended(x: Any) -> Any:
    x = await zrpc.rpc_async("worker0", torch.mul, (x, 1))
    return await zrpc.rpc_async("worker1", both, (x,))


def in_callback(x: Any) -> zrpc.Future[Any]:
    """A callback is in the context of the thread that added it."""
    future = zrpc.rpc_async("worker0", torch.mul, (x, 1))
    return future.then(lambda f: zrpc.rpc_sync("worker1", both, (f.wait(),)))


call_in_callback = zrpc.functions.async_execution(in_callback)


def awaited_in_another_thread(x: Any) -> Any:
    future = zrpc.rpc_async("worker1", both, (x,))
    found = []
    thread = threading.Thread(target=lambda: found.append(future.wait()))
    thread.start()
    thread.join(SOON)
    return found[0]


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x * 1


WAYS: dict[str, Callable[[Any], Any]] = {
    "rpc_sync": lambda x: zrpc.rpc_sync("worker1", both, (x,)),
    "rpc_async": lambda x: zrpc.rpc_async("worker1", both, (x,)).wait(),
    "remote": lambda x: zrpc.remote("worker1", both, (x,)).to_here(),
    "fetched twice": fetched_twice,
    "bound method": lambda x: zrpc.rpc_sync("worker1", Carrier(x).both),
    "method": lambda x: module().rpc_sync().forward(x),
    "method, remote": lambda x: module().remote().forward(x).to_here(),
    "method, coroutine": lambda x: module().rpc_sync().later(x),
    "method, async_execution": lambda x: module().rpc_sync().async_(x),
    "kept between calls": kept_between_calls,
    "RRef as argument": lambda x: zrpc.rpc_sync("worker1", use_rref, (zrpc.RRef(x),)),
    "RRef as result": lambda x: zrpc.rpc_sync("worker1", make_rref, (x,)).to_here(),
    "RRef of a third": lambda x: zrpc.rpc_sync(
        "worker1", use_rref, (zrpc.remote("worker2", torch.mul, (x, 1)),)
    ),
    "coroutine that was suspended": lambda x: zrpc.rpc_sync("worker2", suspended, (x,)),
    "callback here": lambda x: in_callback(x).wait(),
    "callback there": lambda x: zrpc.rpc_sync("worker2", call_in_callback, (x,)),
    "async_execution, remote": lambda x: zrpc.remote("worker2", call_in_callback, (x,)).to_here(),
    "awaited in another thread": awaited_in_another_thread,
    "TorchScript": lambda x: zrpc.rpc_sync(
        "worker1", both, (zrpc.rpc_sync("worker2", scripted, (x,)),)
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_call(mesh: Mesh, way: str) -> None:
    assert_expected(mesh, WAYS[way])


TO_ONESELF: list[Callable[[Any], Any]] = [
    lambda x: zrpc.rpc_sync("worker0", both, (x,)),
    lambda x: zrpc.remote("worker0", both, (x,)).to_here(),
    lambda x: zrpc.rpc_sync("worker1", zrpc.rpc_sync, ("worker0", both, (x,))),
]


def test_calls_to_oneself(mesh: Mesh, make_mesh: MakeMesh) -> None:
    for way in TO_ONESELF:
        assert_expected(mesh, way, to=0)
    found = train(make_mesh(workers=1), lambda: (TO_ONESELF[0](X.sin()) * 2).sum())
    torch.testing.assert_close([found[X], found[W[1]]], list(EXPECTED))


@pytest.mark.zrpc(workers=2)
def test_a_profile_shows_the_pass_and_its_nodes_by_the_names_that_torch_has(caller: Mesh) -> None:
    with dist_autograd.context() as context_id:
        loss = zrpc.rpc_sync("worker1", torch.mul, (X, 2)).sum()
        with torch.autograd.profiler.profile() as profile:
            dist_autograd.backward(context_id, [loss])
    names = {event.name for event in profile.function_events}
    assert "torch::distributed::autograd::backward" in names
    assert {"SendRpcBackward", "RecvRpcBackward"} <= names


class Reduced:
    """One that says itself how it is pickled."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __reduce__(self) -> Any:
        return Reduced, (self.x,)


def cyclic(x: Any) -> Any:
    value = [x]
    value.append(value)
    return value


def module_with(x: Any) -> Any:
    module = torch.nn.Module()
    module.x = x
    return module


WRAPPERS: dict[str, Any] = {
    "list": (lambda x: [1, x], lambda v: v[1]),
    "nested": (lambda x: {"a": [({"b": x},)]}, lambda v: v["a"][0][0]["b"]),
    "object": (Carrier, lambda v: v.x),
    "reduced": (Reduced, lambda v: v.x),
    "cycle": (cyclic, lambda v: v[1][1][0]),
    "module": (module_with, lambda v: v.x),
    "closure": (lambda x: lambda: x, lambda v: v()),
    "beside others": (lambda x: [torch.ones(3), x, torch.ones(1), "x"], lambda v: v[1]),
    "unlike": (lambda x: [x.detach(), x], lambda v: v[1]),
}


def rewrapped(wrapper: str, value: Any) -> Any:
    wrap, unwrap = WRAPPERS[wrapper]
    return wrap(both(unwrap(value)))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapped_arguments_and_results(mesh: Mesh, wrapper: str) -> None:
    wrap, unwrap = WRAPPERS[wrapper]
    assert_expected(mesh, lambda x: unwrap(zrpc.rpc_sync("worker1", rewrapped, (wrapper, wrap(x)))))


def run_module(module: Any, x: Any) -> Any:
    return both(module(x))


def test_a_module_that_travels(mesh: Mesh) -> None:
    """Its parameters are those of the worker that sent it."""
    linear = torch.nn.Linear(3, 3).double()
    found = train(mesh, lambda: zrpc.rpc_sync("worker1", run_module, (linear, X.sin())).sum())
    expected = torch.autograd.grad(both(linear(X.sin())).sum(), [*linear.parameters(), X])
    torch.testing.assert_close([found[at] for at in (*linear.parameters(), X)], list(expected))

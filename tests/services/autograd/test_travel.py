"""The ways to call, and what tensors are in: they are part of the graph however they travel."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import zrpc
import zrpc.autograd as dist_autograd
from tests.services.autograd.split_models import (
    SOON,
    W,
    X,
    assert_freed,
    gradients_at,
    layer,
    train,
)
from zrpc.testing import Mesh
from zrpc.testing.plugin import MakeMesh

pytestmark = pytest.mark.zrpc(workers=3, timeout=60)


def both(x: Any) -> Any:
    return layer(1, x)


EXPECTED = torch.autograd.grad((both(X.sin()) * 2).sum(), [X, W[1]])


def assert_expected(mesh: Mesh, model: Any, to: int = 1) -> None:
    """The model must be ``(both(X.sin()) * 2).sum()`` in some way."""

    def run() -> Any:
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [model()])
            return [gradients_at(mesh, rank, context_id) for rank in range(3)]

    found = mesh.run(0, run)
    torch.testing.assert_close([found[0][X], found[to][W[1]]], list(EXPECTED))
    assert X.grad is None
    assert W[1].grad is None
    assert_freed(mesh)


def run_module(module: Any, x: Any) -> Any:
    return both(module(x))


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
        self.gate = threading.Event()

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


def rpc_sync(x: Any) -> Any:
    return zrpc.rpc_sync("worker1", both, (x,))


def rpc_async(x: Any) -> Any:
    return zrpc.rpc_async("worker1", both, (x,)).wait()


def remote(x: Any) -> Any:
    return zrpc.remote("worker1", both, (x,)).to_here()


def bound_method(x: Any) -> Any:
    return zrpc.rpc_sync("worker1", Carrier(x).both)


def proxy_sync(x: Any) -> Any:
    return zrpc.remote("worker1", Module).rpc_sync().forward(x)


def proxy_remote(x: Any) -> Any:
    return zrpc.remote("worker1", Module).remote().forward(x).to_here()


def proxy_coroutine(x: Any) -> Any:
    return zrpc.remote("worker1", Module).rpc_sync().later(x)


def proxy_async_execution(x: Any) -> Any:
    return zrpc.remote("worker1", Module).rpc_sync().async_(x)


def kept_between_calls(x: Any) -> Any:
    module = zrpc.remote("worker1", Module)
    module.rpc_sync().stored(x)
    return module.rpc_sync().load()


def rref_argument(x: Any) -> Any:
    value = zrpc.RRef(x)
    return zrpc.rpc_sync("worker1", use_rref, (value,))


def use_rref(rref: Any) -> Any:
    return both(rref.to_here())


def rref_result(x: Any) -> Any:
    return zrpc.rpc_sync("worker1", make_rref, (x,)).to_here()


def make_rref(x: Any) -> Any:
    return zrpc.RRef(both(x))


def rref_of_third(x: Any) -> Any:
    """Made at worker2 by worker0, fetched by worker1."""
    value = zrpc.remote("worker2", torch.mul, (x, 1))
    return zrpc.rpc_sync("worker1", use_rref, (value,))


def coroutine_that_calls(x: Any) -> Any:
    return zrpc.rpc_sync("worker2", async_relay, (x,))


async def async_relay(x: Any) -> Any:
    return await zrpc.rpc_async("worker1", both, (x,))


@zrpc.functions.async_execution
def chained(x: Any) -> Any:
    return zrpc.rpc_async("worker1", both, (x,)).then(lambda f: f.wait() * 1)


def async_execution_remote(x: Any) -> Any:
    return zrpc.remote("worker2", chained, (x,)).to_here()


def nested_deep(x: Any) -> Any:
    return zrpc.rpc_sync("worker2", relay, (x, 12))


def relay(x: Any, depth: Any) -> Any:
    if depth == 0:
        return zrpc.rpc_sync("worker1", both, (x,))
    return zrpc.rpc_sync(f"worker{depth % 3}", relay, (x, depth - 1))


def torchscript(x: Any) -> Any:
    y = zrpc.rpc_sync("worker2", scripted, (x,))
    return zrpc.rpc_sync("worker1", both, (y,))


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x * 1


WAYS = [
    rpc_sync,
    rpc_async,
    remote,
    bound_method,
    proxy_sync,
    proxy_remote,
    proxy_coroutine,
    proxy_async_execution,
    kept_between_calls,
    rref_argument,
    rref_result,
    rref_of_third,
    coroutine_that_calls,
    async_execution_remote,
    nested_deep,
    torchscript,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_ways_to_call(mesh: Mesh, way: Any) -> None:
    assert_expected(mesh, lambda: (way(X.sin()) * 2).sum())


def to_self(x: Any) -> Any:
    return zrpc.rpc_sync("worker0", both, (x,))


def to_self_remote(x: Any) -> Any:
    return zrpc.remote("worker0", both, (x,)).to_here()


def to_self_by_another(x: Any) -> Any:
    return zrpc.rpc_sync("worker1", zrpc.rpc_sync, ("worker0", both, (x,)))


@pytest.mark.parametrize(
    "way",
    [to_self, to_self_remote, to_self_by_another],
    ids=lambda way: way.__name__,
)
def test_calls_to_oneself(mesh: Mesh, way: Any) -> None:
    assert_expected(mesh, lambda: (way(X.sin()) * 2).sum(), to=0)


def test_a_mesh_of_one(make_mesh: MakeMesh) -> None:
    mesh = make_mesh(workers=1)
    found = train(mesh, lambda: (to_self(X.sin()) * 2).sum())
    torch.testing.assert_close([found[X], found[W[1]]], list(EXPECTED))


def test_the_same_value_fetched_twice(mesh: Mesh) -> None:
    def model() -> Any:
        rref = zrpc.remote("worker1", both, (X.sin(),))
        return (rref.to_here() + rref.to_here()).sum()

    assert_expected(mesh, model)


def test_an_rref_made_outside_of_the_context(caller: Mesh) -> None:
    """What it refers to is a leaf of its owner."""
    rref = caller.run(0, zrpc.remote, "worker1", torch.ones, (3,), {"requires_grad": True})

    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [(rref.to_here() * X).sum()])
        [found] = gradients_at(caller, 1, context_id).values()
        torch.testing.assert_close(found.double(), X.detach(), check_dtype=False)


def test_a_future_that_is_awaited_in_another_thread(mesh: Mesh) -> None:
    def model() -> Any:
        future = zrpc.rpc_async("worker1", both, (X.sin(),))
        found = []
        thread = threading.Thread(target=lambda: found.append(future.wait()))
        thread.start()
        thread.join(SOON)
        return (found[0] * 2).sum()

    assert_expected(mesh, model)


def test_calls_in_a_then_callback(mesh: Mesh) -> None:
    """A callback is in the context of the thread that added it."""

    def model() -> Any:
        future = zrpc.rpc_async("worker1", torch.sin, (X,))
        return future.then(lambda f: zrpc.rpc_sync("worker1", both, (f.wait(),)) * 2).wait().sum()

    assert_expected(mesh, model)


@zrpc.functions.async_execution
def call_in_callback(x: Any) -> Any:
    future = zrpc.rpc_async("worker0", torch.mul, (x, 1))
    return future.then(lambda f: zrpc.rpc_sync("worker1", both, (f.wait(),)))


def test_calls_in_the_callback_of_an_async_execution(mesh: Mesh) -> None:
    assert_expected(
        mesh, lambda: (zrpc.rpc_sync("worker2", call_in_callback, (X.sin(),)) * 2).sum()
    )


def test_calls_in_a_coroutine_after_it_was_suspended(mesh: Mesh) -> None:
    assert_expected(mesh, lambda: (zrpc.rpc_sync("worker2", suspended, (X.sin(),)) * 2).sum())


async def suspended(x: Any) -> Any:
    x = await zrpc.rpc_async("worker0", torch.mul, (x, 1))
    return await zrpc.rpc_async("worker1", both, (x,))


@pytest.mark.zrpc(workers=2)
def test_a_profile_shows_the_pass_and_its_nodes_by_the_names_that_torch_has(caller: Mesh) -> None:
    with dist_autograd.context() as context_id:
        x = torch.ones(2, requires_grad=True)
        loss = zrpc.rpc_sync("worker1", torch.mul, (x, 2)).sum()
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


def unwrap(wrapper: Any, value: Any) -> Any:
    return both(WRAPPERS[wrapper][1](value))


def wrapped(wrapper: Any, x: Any) -> Any:
    return WRAPPERS[wrapper][0](both(x))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapped_arguments(mesh: Mesh, wrapper: Any) -> None:
    wrap, _ = WRAPPERS[wrapper]
    assert_expected(
        mesh,
        lambda: (zrpc.rpc_sync("worker1", unwrap, (wrapper, wrap(X.sin()))) * 2).sum(),
    )


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrapped_results(mesh: Mesh, wrapper: Any) -> None:
    _, unwrap = WRAPPERS[wrapper]
    assert_expected(
        mesh,
        lambda: (unwrap(zrpc.rpc_sync("worker1", wrapped, (wrapper, X.sin()))) * 2).sum(),
    )


def test_a_module_that_travels(mesh: Mesh) -> None:
    """Its parameters are those of the worker that sent it."""
    linear = torch.nn.Linear(3, 3).double()
    found = train(mesh, lambda: zrpc.rpc_sync("worker1", run_module, (linear, X.sin())).sum())
    expected = torch.autograd.grad(both(linear(X.sin())).sum(), [*linear.parameters(), X])
    torch.testing.assert_close([found[at] for at in (*linear.parameters(), X)], list(expected))

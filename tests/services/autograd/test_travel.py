"""The ways to call: tensors that travel by any of them are part of the graph."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import zrpc
import zrpc.autograd as dist_autograd
from tests.services.autograd.both_sides import EXPECTED, Carrier, assert_expected, both, run_module
from tests.services.autograd.split_models import (
    SOON,
    W,
    X,
    assert_freed,
    gradients_at,
    layer,
    train,
)
from tests.support.identity import here
from zrpc.testing import Mesh
from zrpc.testing.plugin import MakeMesh

pytestmark = pytest.mark.zrpc(workers=3, timeout=60)


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


# Ways to call.


def rpc_sync(x: Any) -> Any:
    return zrpc.rpc_sync("worker1", both, (x,))


def rpc_async(x: Any) -> Any:
    return zrpc.rpc_async("worker1", both, (x,)).wait()


def rpc_async_then(x: Any) -> Any:
    return zrpc.rpc_async("worker1", both, (x,)).then(lambda f: f.wait() * 1).wait()


def remote(x: Any) -> Any:
    return zrpc.remote("worker1", both, (x,)).to_here()


def by_keyword(x: Any) -> Any:
    return zrpc.rpc_sync("worker1", both, kwargs={"x": x})


def bound_method(x: Any) -> Any:
    return zrpc.rpc_sync("worker1", Carrier(x).both)


def proxy_sync(x: Any) -> Any:
    return zrpc.remote("worker1", Module).rpc_sync().forward(x)


def proxy_async(x: Any) -> Any:
    return zrpc.remote("worker1", Module).rpc_async().forward(x).wait()


def proxy_remote(x: Any) -> Any:
    return zrpc.remote("worker1", Module).remote().forward(x).to_here()


def proxy_keyword(x: Any) -> Any:
    return zrpc.remote("worker1", Module).rpc_sync().forward(x=x)


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


def coroutine(x: Any) -> Any:
    return zrpc.rpc_sync("worker1", async_both, (x,))


async def async_both(x: Any) -> Any:
    return both(x)


def coroutine_that_calls(x: Any) -> Any:
    return zrpc.rpc_sync("worker2", async_relay, (x,))


async def async_relay(x: Any) -> Any:
    return await zrpc.rpc_async("worker1", both, (x,))


def async_execution(x: Any) -> Any:
    return zrpc.rpc_sync("worker2", relay_future, (x,))


@zrpc.functions.async_execution
def relay_future(x: Any) -> Any:
    return zrpc.rpc_async("worker1", both, (x,))


def async_execution_chained(x: Any) -> Any:
    return zrpc.rpc_sync("worker2", chained, (x,))


@zrpc.functions.async_execution
def chained(x: Any) -> Any:
    return zrpc.rpc_async("worker1", both, (x,)).then(lambda f: f.wait() * 1)


def async_execution_remote(x: Any) -> Any:
    return zrpc.remote("worker2", chained, (x,)).to_here()


def nested(x: Any) -> Any:
    return zrpc.rpc_sync(
        "worker2", zrpc.rpc_sync, ("worker0", zrpc.rpc_sync, ("worker1", both, (x,)))
    )


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


def module_by_value(x: Any) -> Any:
    return zrpc.rpc_sync("worker1", run_module, (torch.nn.Identity(), x))


WAYS = [
    rpc_sync,
    rpc_async,
    rpc_async_then,
    remote,
    by_keyword,
    bound_method,
    proxy_sync,
    proxy_async,
    proxy_remote,
    proxy_keyword,
    proxy_coroutine,
    proxy_async_execution,
    kept_between_calls,
    rref_argument,
    rref_result,
    rref_of_third,
    coroutine,
    coroutine_that_calls,
    async_execution,
    async_execution_chained,
    async_execution_remote,
    nested,
    nested_deep,
    torchscript,
    module_by_value,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_ways_to_call(mesh: Mesh, way: Any) -> None:
    assert_expected(mesh, lambda: (way(X.sin()) * 2).sum())


def to_self(x: Any) -> Any:
    return zrpc.rpc_sync("worker0", both, (x,))


def to_self_async(x: Any) -> Any:
    return zrpc.rpc_async("worker0", both, (x,)).wait()


def to_self_remote(x: Any) -> Any:
    return zrpc.remote("worker0", both, (x,)).to_here()


def to_self_nested(x: Any) -> Any:
    return zrpc.rpc_sync(
        "worker0", zrpc.rpc_sync, ("worker0", zrpc.rpc_sync, ("worker0", both, (x,)))
    )


def to_self_by_another(x: Any) -> Any:
    return zrpc.rpc_sync("worker1", zrpc.rpc_sync, ("worker0", both, (x,)))


@pytest.mark.parametrize(
    "way",
    [to_self, to_self_async, to_self_remote, to_self_nested, to_self_by_another],
    ids=lambda way: way.__name__,
)
def test_calls_to_oneself(mesh: Mesh, way: Any) -> None:
    assert_expected(mesh, lambda: (way(X.sin()) * 2).sum(), to=0)


def test_a_mesh_of_one(make_mesh: MakeMesh) -> None:
    mesh = make_mesh(workers=1)
    found = train(mesh, lambda: (to_self(X.sin()) * 2).sum())
    torch.testing.assert_close([found[X], found[W[1]]], list(EXPECTED))


# Ways to wait for an answer.


def test_the_same_value_fetched_twice(mesh: Mesh) -> None:
    def model() -> Any:
        rref = zrpc.remote("worker1", both, (X.sin(),))
        return (rref.to_here() + rref.to_here()).sum()

    assert_expected(mesh, model)


def test_an_rref_made_outside_of_the_context(mesh: Mesh) -> None:
    """What it refers to is a leaf of its owner."""
    rref = mesh.run(0, zrpc.remote, "worker1", torch.ones, (3,), {"requires_grad": True})

    def run() -> Any:
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [(rref.to_here() * X).sum()])
            [found] = gradients_at(mesh, 1, context_id).values()
            return found

    torch.testing.assert_close(mesh.run(0, run).double(), X.detach(), check_dtype=False)


def test_a_future_that_is_awaited_in_another_thread(mesh: Mesh) -> None:
    def model() -> Any:
        future = zrpc.rpc_async("worker1", both, (X.sin(),))
        found = []
        thread = threading.Thread(target=lambda: found.append(future.wait()))
        thread.start()
        thread.join(SOON)
        return (found[0] * 2).sum()

    assert_expected(mesh, model)


def test_a_future_that_is_awaited_after_the_context(mesh: Mesh) -> None:
    def run() -> Any:
        with dist_autograd.context():
            return zrpc.rpc_async("worker1", both, (X.sin(),))

    future = mesh.run(0, run)
    torch.testing.assert_close(future.wait().detach(), both(X.sin()).detach())
    assert_freed(mesh)


def test_results_that_are_awaited_in_another_order(mesh: Mesh) -> None:
    def model() -> Any:
        first, second, third = (
            zrpc.rpc_async(f"worker{rank}", here(layer), (rank, X * rank)) for rank in (1, 2, 1)
        )
        c, a, b = third.wait(), first.wait(), second.wait()
        return (a * b + c).sum()

    found = train(mesh, model)
    a, b, c = (layer(rank, X * rank) for rank in (1, 2, 1))
    expected = torch.autograd.grad((a * b + c).sum(), [X, W[1], W[2]])
    torch.testing.assert_close([found[at] for at in (X, W[1], W[2])], list(expected))


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
def test_a_profile_shows_the_pass_and_its_nodes_by_the_names_that_torch_has(mesh: Mesh) -> None:
    def run() -> set[str]:
        with dist_autograd.context() as context_id:
            x = torch.ones(2, requires_grad=True)
            loss = zrpc.rpc_sync("worker1", torch.mul, (x, 2)).sum()
            with torch.autograd.profiler.profile() as profile:
                dist_autograd.backward(context_id, [loss])
        return {event.name for event in profile.function_events}

    names = mesh.run(0, run)
    assert "torch::distributed::autograd::backward" in names
    assert {"SendRpcBackward", "RecvRpcBackward"} <= names

"""Calls in a context that fail hold up no pass."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import zrpc
import zrpc.autograd as dist_autograd
from tests.services.autograd.split_models import (
    LEAVES,
    SOON,
    W,
    X,
    assert_as_local,
    assert_freed,
    call,
    gradients_at,
    layer,
    local_gradients,
)
from tests.support.identity import here
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=3, timeout=15)


def test_a_call_that_raised_after_it_took_tensors(mesh: Mesh) -> None:
    def fail(x: Any) -> None:
        layer(1, x)
        raise KeyError("on purpose")

    def model() -> Any:
        x = X.sin()
        if zrpc.agent.current.find_agent() is not None:
            with pytest.raises(KeyError):
                call("worker1", fail, x)
        return call("worker1", layer, 1, x).sum()

    assert_as_local(mesh, model, LEAVES)


def test_a_nested_call_that_raised(mesh: Mesh) -> None:
    def fail(x: Any) -> None:
        raise KeyError("on purpose")

    def relay(x: Any) -> Any:
        x = layer(1, x)
        if zrpc.agent.current.find_agent() is not None:
            with pytest.raises(KeyError):
                call("worker2", fail, x)
        return x

    assert_as_local(mesh, lambda: call("worker1", relay, X).sum(), LEAVES)


def test_a_result_that_cannot_be_pickled(mesh: Mesh) -> None:
    def there(x: Any) -> Any:
        return layer(1, x), threading.Lock()

    def model() -> Any:
        x = X.sin()
        if zrpc.agent.current.find_agent() is not None:
            with pytest.raises(RuntimeError, match="pickle"):
                call("worker1", there, x)
        return call("worker1", layer, 1, x).sum()

    assert_as_local(mesh, model, LEAVES)


def test_arguments_that_cannot_be_pickled(mesh: Mesh) -> None:
    def model() -> Any:
        x = X.sin()
        if zrpc.agent.current.find_agent() is not None:
            with pytest.raises(RuntimeError, match="pickle"):
                call("worker1", layer, threading.Lock(), x)
        return call("worker1", layer, 1, x).sum()

    assert_as_local(mesh, model, LEAVES)


class NotRebuilt:
    def __init__(self, x: Any) -> None:
        self.x = x

    def __setstate__(self, state: Any) -> None:
        raise ValueError("not rebuilt on purpose")


def test_arguments_that_cannot_be_rebuilt(mesh: Mesh) -> None:
    """The tensors have arrived when the rest is found to be broken."""

    def model() -> Any:
        x = X.sin()
        if zrpc.agent.current.find_agent() is not None:
            with pytest.raises(RuntimeError, match="not rebuilt on purpose"):
                call("worker1", layer, NotRebuilt(x), x)
        return call("worker1", layer, 1, x).sum()

    assert_as_local(mesh, model, LEAVES)


def test_a_result_that_cannot_be_rebuilt(mesh: Mesh) -> None:
    def there(x: Any) -> Any:
        return NotRebuilt(layer(1, x))

    def run() -> Any:
        with dist_autograd.context() as context_id:
            x = X.sin()
            for _ in range(2):
                future = zrpc.rpc_async("worker1", here(there), (x,))
                for _ in range(2):  # the same error each time
                    with pytest.raises(RuntimeError, match="not rebuilt on purpose"):
                        future.wait()
            dist_autograd.backward(context_id, [call("worker1", layer, 1, x).sum()])
            return gradients_at(mesh, 0, context_id)[X]

    [expected] = local_gradients(lambda: layer(1, X.sin()).sum(), [X])
    torch.testing.assert_close(mesh.run(0, run), expected)
    assert_freed(mesh)


@pytest.mark.parametrize("late", ["during", "before"])
def test_a_call_whose_timeout_passed(mesh: Mesh, late: str) -> None:
    """Its result comes before the pass, or while that runs, or never."""
    go, done = threading.Event(), threading.Event()

    def slow(x: Any) -> Any:
        y = layer(1, x)
        assert go.wait(SOON)
        try:
            return y
        finally:
            done.set()

    def wait(gradient: Any) -> None:
        if late == "during":
            go.set()
            assert done.wait(SOON)

    def run() -> Any:
        with dist_autograd.context() as context_id:
            x = X.sin()
            x.register_hook(wait)
            with pytest.raises(RuntimeError, match="RPC ran for more than set timeout"):
                zrpc.rpc_sync("worker1", here(slow), (x,), timeout=0.1)
            if late == "before":
                go.set()
                assert done.wait(SOON)
                settle_from(0)
            dist_autograd.backward(context_id, [call("worker1", layer, 1, x).sum()])
            return gradients_at(mesh, 0, context_id)[X], gradients_at(mesh, 1, context_id)[W[1]]

    def settle_from(rank: Any) -> None:
        for _ in range(3):
            zrpc.rpc_sync("worker1", max, (1, 2))

    try:
        found = mesh.run(0, run)
    finally:
        go.set()
    expected = local_gradients(lambda: layer(1, X.sin()).sum(), [X, W[1]])
    torch.testing.assert_close(list(found), expected)
    assert_freed(mesh)


@pytest.mark.system
def test_a_future_that_nobody_awaits(mesh: Mesh) -> None:
    def run() -> Any:
        with dist_autograd.context() as context_id:
            x = X.sin()
            zrpc.rpc_async("worker1", here(layer), (1, x))
            zrpc.remote("worker2", here(layer), (2, x))
            dist_autograd.backward(context_id, [call("worker1", layer, 1, x).sum()])
            return gradients_at(mesh, 0, context_id)[X]

    [expected] = local_gradients(lambda: layer(1, X.sin()).sum(), [X])
    for _ in range(20):
        torch.testing.assert_close(mesh.run(0, run), expected)
    assert_freed(mesh)

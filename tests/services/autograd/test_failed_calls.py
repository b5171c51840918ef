"""Calls in a context that fail hold up no pass."""

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
    call,
    gradients_at,
    layer,
    local_gradients,
)
from tests.support.identity import here
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=3, timeout=15)


class NotRebuilt:
    def __init__(self, x: Any) -> None:
        self.x = x

    def __setstate__(self, state: Any) -> None:
        raise ValueError("not rebuilt on purpose")


def fail(x: Any) -> None:
    layer(1, x)
    raise KeyError("on purpose")


FAILING: list[Any] = [
    ("on purpose", lambda x: call("worker1", fail, x)),
    ("on purpose", lambda x: call("worker1", call, "worker2", fail, x)),
    ("pickle", lambda x: call("worker1", lambda y: (layer(1, y), threading.Lock()), x)),
    ("pickle", lambda x: call("worker1", layer, threading.Lock(), x)),
    # The tensors have arrived when the rest is found to be broken.
    ("not rebuilt on purpose", lambda x: call("worker1", layer, NotRebuilt(x), x)),
]


@pytest.mark.parametrize(("text", "failing"), FAILING)
def test_a_call_that_failed(caller: Mesh, text: str, failing: Any) -> None:
    with dist_autograd.context() as context_id:
        x = X.sin()
        with pytest.raises((RuntimeError, KeyError), match=text):
            failing(x)
        dist_autograd.backward(context_id, [call("worker1", layer, 1, x).sum()])
        found = gradients_at(caller, 0, context_id)[X]
    torch.testing.assert_close([found], local_gradients(lambda: layer(1, X.sin()).sum(), [X]))


def test_a_result_that_cannot_be_rebuilt(caller: Mesh) -> None:
    def there(x: Any) -> Any:
        return NotRebuilt(layer(1, x))

    [expected] = local_gradients(lambda: layer(1, X.sin()).sum(), [X])
    with dist_autograd.context() as context_id:
        x = X.sin()
        for _ in range(2):
            future = zrpc.rpc_async("worker1", here(there), (x,))
            for _ in range(2):  # the same error each time
                with pytest.raises(RuntimeError, match="not rebuilt on purpose"):
                    future.wait()
        dist_autograd.backward(context_id, [call("worker1", layer, 1, x).sum()])
        torch.testing.assert_close(gradients_at(caller, 0, context_id)[X], expected)
    assert_freed(caller)


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

"""Gradients do not depend on what a thread has set as torch's defaults."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import zrpc.autograd as dist_autograd
from tests.services.autograd.split_models import (
    W,
    X,
    assert_freed,
    call,
    gradients,
    layer,
    leaf,
    local_gradients,
    train,
)
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=3, timeout=60)


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def in_device() -> Any:
    return torch.device("meta")


DEFAULTS = pytest.mark.parametrize(
    "defaults", [default_device, in_device, default_dtype], ids=lambda f: f.__name__
)


def there_and_back(x: Any) -> Any:
    return call("worker0", layer, 0, call("worker2", layer, 2, layer(1, x)))


def model() -> Any:
    x = layer(0, X)
    return (x + call("worker1", there_and_back, x)).sum()


LEAVES = [X, *W]


def check(found: Any) -> None:
    for at, expected in zip(LEAVES, local_gradients(model, LEAVES), strict=True):
        torch.testing.assert_close(found[at], expected)


@DEFAULTS
def test_defaults_where_a_pass_begins(mesh: Mesh, defaults: Any) -> None:
    def run() -> Any:
        with defaults(), dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [model()])
            return gradients(mesh, context_id)

    check(mesh.run(0, run))
    assert_freed(mesh)


@DEFAULTS
def test_defaults_of_a_handler(mesh: Mesh, defaults: Any) -> None:
    def there(x: Any) -> Any:
        with defaults():
            return there_and_back(x)

    check(train(mesh, lambda: (lambda x: (x + call("worker1", there, x)).sum())(layer(0, X))))


@DEFAULTS
def test_defaults_of_the_backward_pass_alone(mesh: Mesh, defaults: Any) -> None:
    def run() -> Any:
        with dist_autograd.context() as context_id:
            loss = model()
            with defaults():
                dist_autograd.backward(context_id, [loss], retain_graph=True)
            found = gradients(mesh, context_id)
            dist_autograd.backward(context_id, [loss])
            again = gradients(mesh, context_id)
        torch.testing.assert_close(again, {at: value * 2 for at, value in found.items()})
        return found

    check(mesh.run(0, run))


def test_a_handler_that_calls_in_inference_mode(mesh: Mesh) -> None:
    """What comes from there is used as a constant; the context goes on."""
    w = leaf(3, seed=5)

    def there(x: Any) -> Any:
        with torch.inference_mode():
            scale = call("worker2", layer, 2, x)
        return x * w * scale.clone()

    def model() -> Any:
        return (call("worker1", there, layer(0, X)) + call("worker1", layer, 1, X)).sum()

    leaves = [X, W[0], W[1], w]
    expected = local_gradients(model, leaves)
    found = train(mesh, model)
    for at, gradient in zip(leaves, expected, strict=True):
        torch.testing.assert_close(found[at], gradient)


def test_a_context_that_begins_in_inference_mode(mesh: Mesh) -> None:
    """Its first message is sent there, outside of the graph."""

    def run() -> Any:
        with torch.inference_mode():
            block = dist_autograd.context()
            context_id = block.__enter__()
            call("worker1", layer, 1, X)
        try:
            dist_autograd.backward(context_id, [model()])
            return gradients(mesh, context_id)
        finally:
            block.__exit__(None, None, None)

    check(mesh.run(0, run))

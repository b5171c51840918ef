"""Nodes, also those of custom Functions, run once, and only if they lead to the roots."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import zrpc
import zrpc.autograd as dist_autograd
from tests.services.autograd.split_models import (
    LEAVES,
    X,
    assert_as_local,
    call,
    layer,
    leaf,
    train,
)
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=3, timeout=60)


class Counted(torch.autograd.Function):
    """The cube, which counts its runs."""

    forwards = 0
    backwards = 0
    lock = threading.Lock()

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        with Counted.lock:
            Counted.forwards += 1
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        with Counted.lock:
            Counted.backwards += 1
        (x,) = ctx.saved_tensors
        return gradient * 3 * x**2


@pytest.fixture
def counted() -> Any:
    Counted.forwards = Counted.backwards = 0
    return Counted


def cubed(rank: Any, x: Any) -> Any:
    return Counted.apply(layer(rank, x))


def test_each_node_runs_once_in_a_pass(mesh: Mesh, counted: Any) -> None:
    def model() -> Any:
        x = Counted.apply(X)
        for hop in range(8):
            rank = 1 + hop % 2
            x = x + call(f"worker{rank}", cubed, rank, x) * 0.1
        return x.sum()

    train(mesh, model)
    assert (counted.forwards, counted.backwards) == (9, 9)
    assert_as_local(mesh, model, LEAVES)


def test_each_node_runs_once_in_each_of_two_passes(mesh: Mesh, counted: Any) -> None:
    def model() -> Any:
        x = Counted.apply(X)
        return (x + call("worker1", cubed, 1, x) + call("worker2", cubed, 2, x)).sum()

    train(mesh, model, passes=2)
    assert (counted.forwards, counted.backwards) == (3, 6)


def test_a_node_that_leads_to_no_root_does_not_run(mesh: Mesh, counted: Any) -> None:
    def model() -> Any:
        Counted.apply(X)
        far = call("worker1", layer, 1, X)
        Counted.apply(far)
        return far.sum()

    train(mesh, model)
    assert (counted.forwards, counted.backwards) == (2, 0)


class Attributes(torch.autograd.Function):
    """A function that names its own things as torch's nodes name theirs."""

    @staticmethod
    def forward(ctx: Any, x: Any, names: Any) -> Any:
        for name in names:
            setattr(ctx, name, torch.ones(1))
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * 2, None


@pytest.mark.parametrize("name", ["variable", "token", "link", "tensors"])
def test_a_custom_function_with_attributes_of_its_own(mesh: Mesh, name: str) -> None:
    def there(x: Any) -> Any:
        return Attributes.apply(layer(1, x), [name])

    def model() -> Any:
        return call("worker1", there, Attributes.apply(layer(0, X), [name])).sum()

    assert_as_local(mesh, model, LEAVES)


class Split(torch.autograd.Function):
    """Several outputs, not all of them differentiable, without gradients for unused ones."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.set_materialize_grads(False)
        order = x.argsort()
        ctx.mark_non_differentiable(order)
        return x.sin(), x * 2, order

    @staticmethod
    def backward(ctx: Any, first: Any, second: Any, order: Any) -> Any:
        assert first is None
        return second * 2


def test_a_custom_function_with_unused_outputs(mesh: Mesh) -> None:
    def there(x: Any) -> Any:
        return Split.apply(layer(1, x))

    def model() -> Any:
        _, used, order = call("worker1", there, X)
        assert not order.requires_grad
        return used.sum()

    # Copies are nodes of their own, which would give the unused output a gradient of None too.
    assert_as_local(mesh, model, LEAVES)


def test_a_function_that_is_differentiated_by_torch_within_backward(mesh: Mesh) -> None:
    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            return x.exp()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                return torch.autograd.grad(x.exp(), x, gradient)[0]

    def model() -> Any:
        return call("worker1", lambda x: Nested.apply(layer(1, x)), Nested.apply(X)).sum()

    assert_as_local(mesh, model, LEAVES)


def test_a_call_in_a_backward_function(mesh: Mesh) -> None:
    """Code of the backward pass may call, also where it is run for another worker."""

    class Far(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return call("worker2", torch.mul, gradient, 2)

    def model() -> Any:
        return call("worker1", lambda x: Far.apply(layer(1, x)), Far.apply(X)).sum()

    assert_as_local(mesh, model, LEAVES)


def test_the_gradient_of_a_leaf_is_its_own(mesh: Mesh) -> None:
    """Leaves whose gradients are equal do not share them."""
    a, b = leaf(3, seed=1), leaf(3, seed=2)

    def run() -> Any:
        with dist_autograd.context() as context_id:
            loss = zrpc.rpc_sync("worker1", torch.sum, (a + b,))
            dist_autograd.backward(context_id, [loss])
            found = dist_autograd.get_gradients(context_id)
            found[a].mul_(5)
            return found[a], found[b]

    first, second = mesh.run(0, run)
    assert torch.equal(first, torch.full_like(a, 5))
    assert torch.equal(second, torch.ones_like(b))

"""What leads to no root changes nothing: no error, no gradient, no hook is called."""

from __future__ import annotations

import threading
from collections.abc import Iterator
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
    call,
    gradients_at,
    layer,
    leaf,
    posted,
)
from tests.support.identity import here
from zrpc.optim import DistributedOptimizer
from zrpc.testing import Mesh
from zrpc.wire.kind import Kind

pytestmark = pytest.mark.zrpc(workers=3, timeout=60)

# Each branch is made from W[1], returns what is sent, and must not be run by a pass.


def trained(_: torch.Tensor) -> torch.Tensor:
    """A handler that trains by itself and returns its loss for the log."""
    weight = W[1]
    loss = (weight**2).sum()
    (gradient,) = torch.autograd.grad(loss, weight)
    assert gradient.any()
    return loss


def changed_in_place(x: torch.Tensor) -> torch.Tensor:
    saved = W[1].exp()
    result = saved * x
    with torch.no_grad():
        saved.zero_()
    return result


class Infinite(torch.autograd.Function):
    """Zeros as the gradient give NaN."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * float("inf")


class Once(torch.autograd.Function):
    """Zeros as the gradient give zeros."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        raise ValueError("run by mistake")


def infinite(x: torch.Tensor) -> torch.Tensor:
    return Infinite.apply(W[1]) @ x


def broken(x: torch.Tensor) -> torch.Tensor:
    return Broken.apply(W[1]) @ x


def hooked(x: torch.Tensor) -> torch.Tensor:
    def fail(gradient: Any) -> None:
        raise ValueError("called by mistake")

    inner = W[1] * 2
    inner.register_hook(fail)
    assert inner.grad_fn is not None
    inner.grad_fn.register_prehook(fail)
    return inner @ x


BRANCHES = [trained, changed_in_place, infinite, broken, hooked]


@pytest.fixture(params=BRANCHES, ids=lambda branch: branch.__name__)
def branch(request: pytest.FixtureRequest) -> Iterator[Any]:
    return request.param


def test_a_branch_of_its_own(mesh: Mesh, branch: Any) -> None:
    def model() -> Any:
        call("worker1", branch, X)
        return call("worker2", layer, 2, X).sum()

    assert_as_local(mesh, model, LEAVES)


def test_a_branch_from_a_parameter_in_use(mesh: Mesh, branch: Any) -> None:
    def model() -> Any:
        x = call("worker1", layer, 1, X)
        call("worker1", branch, x)
        return call("worker1", layer, 1, x).sum()

    assert_as_local(mesh, model, LEAVES)


def test_a_branch_in_one_message_with_what_is_used(mesh: Mesh, branch: Any) -> None:
    def there(x: Any) -> Any:
        return branch(x), layer(1, x), branch(x)

    def model() -> Any:
        _, x, _ = call("worker1", there, X)
        _, x, _ = call("worker1", there, x)
        return x.sum()

    assert_as_local(mesh, model, LEAVES)


def test_a_branch_that_is_sent_as_an_argument(mesh: Mesh, branch: Any) -> None:
    """worker0 waits for gradients on both sides of that call."""

    def model() -> Any:
        x = call("worker2", layer, 2, X)
        call("worker2", torch.sin, branch(x))
        y = call("worker2", layer, 2, layer(1, x))
        call("worker2", torch.sin, branch(y))
        return call("worker2", layer, 2, y).sum()

    assert_as_local(mesh, model, LEAVES)


def test_a_branch_that_goes_on_at_a_third_worker(mesh: Mesh, branch: Any) -> None:
    def there(x: Any) -> Any:
        y = layer(1, x)
        call("worker2", torch.sin, branch(x))
        return y

    def model() -> Any:
        x = call("worker1", there, X)
        return call("worker1", there, x).sum()

    assert_as_local(mesh, model, LEAVES)


def test_parameters_of_unused_branches_have_no_gradient(mesh: Mesh) -> None:
    def run() -> Any:
        with dist_autograd.context() as context_id:
            call("worker1", layer, 1, X)
            loss = call("worker2", layer, 2, X).sum()
            dist_autograd.backward(context_id, [loss])
            return [set(gradients_at(mesh, rank, context_id)) for rank in range(3)]

    assert mesh.run(0, run) == [{X}, set(), {W[2]}]


def test_an_optimizer_does_not_move_what_is_unused(mesh: Mesh) -> None:
    weight = leaf(3)
    before = weight.detach().clone()

    def run() -> None:
        reference = zrpc.remote("worker1", here(lambda: weight))
        optimizer = DistributedOptimizer(torch.optim.SGD, [reference], lr=0.1, weight_decay=0.1)
        with dist_autograd.context() as context_id:
            call("worker1", lambda: Once.apply(weight))
            dist_autograd.backward(context_id, [(X**2).sum()])
            optimizer.step(context_id)

    mesh.run(0, run)
    assert torch.equal(weight.detach(), before)


def test_workers_without_a_part_are_not_asked_to_take_one(mesh: Mesh) -> None:
    def model() -> Any:
        call("worker1", layer, 1, X)
        return call("worker2", layer, 2, X).sum()

    with posted(mesh) as counts:
        assert_as_local(mesh, model, LEAVES)
    assert counts[Kind.BACKWARD] == 1


def test_an_unused_branch_costs_no_gradient_message(mesh: Mesh) -> None:
    def model() -> Any:
        x = X.sin()
        for _ in range(5):
            call("worker1", layer, 1, x)
        return call("worker2", layer, 2, x).sum()

    with posted(mesh) as counts:
        assert_as_local(mesh, model, LEAVES)
    assert counts[Kind.GRADIENT] == 2


def test_an_unused_branch_can_have_a_pass_of_its_own_later(mesh: Mesh) -> None:
    """The first pass neither runs nor frees it."""

    def run() -> Any:
        with dist_autograd.context() as context_id:
            first, second = call("worker1", lambda: (W[1].sin(), W[1].exp()))
            dist_autograd.backward(context_id, [first.sum()])
            dist_autograd.backward(context_id, [second.sum()])
            return gradients_at(mesh, 1, context_id)[W[1]]

    [expected] = torch.autograd.grad(W[1].sin().sum() + W[1].exp().sum(), [W[1]])
    torch.testing.assert_close(mesh.run(0, run), expected)


def test_the_first_node_of_a_thread_runs_before_a_wait(mesh: Mesh) -> None:
    """It has the lowest sequence number; worker1 needs its gradient before it answers."""
    results: list[torch.Tensor] = []

    def in_new_thread(fn: Any, *args: Any) -> Any:
        thread = threading.Thread(target=lambda: results.append(fn(*args)))
        thread.start()
        thread.join(SOON)
        return results.pop()

    def model() -> Any:
        x = X.sin()
        y = call("worker1", layer, 1, x)
        z = in_new_thread(torch.tanh, y)
        return sum(in_new_thread(torch.mul, z, factor).sum() for factor in range(1, 9))

    assert_as_local(mesh, model, LEAVES)

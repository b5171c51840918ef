"""Gradients across workers equal those of the same model in one process, for graphs of any form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zrpc
import zrpc.autograd as dist_autograd
from tests.services.autograd.split_models import (
    LEAVES,
    W,
    X,
    assert_as_local,
    call,
    gradients_at,
    layer,
    local_gradients,
    train,
)
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=3, timeout=60)


def test_a_chain_over_two_workers(mesh: Mesh) -> None:
    def model() -> Any:
        return (call("worker1", layer, 1, X @ W[0]) ** 2).sum()

    assert_as_local(mesh, model, LEAVES)


def test_a_chain_over_all_workers_there_and_back(mesh: Mesh) -> None:
    def on(rank: Any, x: Any) -> Any:
        x = layer(rank, x)
        if rank < 2:
            x = call(f"worker{rank + 1}", on, rank + 1, x)
        return layer(rank, x)

    assert_as_local(mesh, lambda: on(0, X).sum(), LEAVES)


def ping_pong(rank: Any, depth: Any, x: Any) -> Any:
    x = layer(rank, x)
    if depth == 0:
        return x
    return x + layer(rank, call(f"worker{1 - rank}", ping_pong, 1 - rank, depth - 1, x))


@pytest.mark.parametrize("depth", [1, 2, 3, 8])
def test_ping_pong(mesh: Mesh, depth: int) -> None:
    assert_as_local(mesh, lambda: ping_pong(0, depth, X).sum(), LEAVES)


def test_a_diamond(mesh: Mesh) -> None:
    def model() -> Any:
        x = X @ W[0]
        left, right = call("worker1", layer, 1, x), call("worker2", layer, 2, x)
        return (left * right).sum()

    assert_as_local(mesh, model, LEAVES)


def test_a_diamond_that_joins_at_a_third_worker(mesh: Mesh) -> None:
    def join(left: Any, right: Any) -> Any:
        return left * right @ W[2]

    def model() -> Any:
        x = X @ W[0]
        left = call("worker1", layer, 1, x)
        return call("worker2", join, left, call("worker1", layer, 1, left + x)).sum()

    assert_as_local(mesh, model, LEAVES)


@pytest.mark.parametrize("workers", [[1], [1, 2]], ids=["one worker", "two workers"])
def test_a_chain_of_residual_hops(mesh: Mesh, workers: Any) -> None:
    def model() -> Any:
        x = X
        for i in range(8):
            rank = workers[i % len(workers)]
            x = x + call(f"worker{rank}", layer, rank, x)
        return x.sum()

    assert_as_local(mesh, model, LEAVES)


def test_a_parameter_on_both_sides_of_a_hop(mesh: Mesh) -> None:
    def use(x: Any, w: Any) -> Any:
        return torch.tanh(x @ w) @ W[1]

    def model() -> Any:
        return call("worker1", use, X @ W[0], W[0]).sum() + (W[0] ** 2).sum()

    assert_as_local(mesh, model, LEAVES)


def test_the_same_leaf_at_two_workers(mesh: Mesh) -> None:
    """Their gradients are held apart, each by the worker that used it."""

    def run() -> Any:
        with dist_autograd.context() as context_id:
            loss = (call("worker1", layer, 1, X @ W[1])).sum()
            dist_autograd.backward(context_id, [loss])
            return [gradients_at(mesh, rank, context_id) for rank in range(3)]

    here, there, nowhere = mesh.run(0, run)
    [expected] = local_gradients(lambda: layer(1, X @ W[1]).sum(), [W[1]])
    torch.testing.assert_close(here[W[1]] + there[W[1]], expected)
    assert X in here
    assert X not in there
    assert nowhere == {}


def test_an_activation_used_here_and_there(mesh: Mesh) -> None:
    def model() -> Any:
        x = torch.tanh(X @ W[0])
        far = call("worker1", layer, 1, x)
        near = torch.sin(x @ W[0])
        return (far * near + x).sum()

    assert_as_local(mesh, model, LEAVES)


def test_a_remote_result_used_several_times(mesh: Mesh) -> None:
    def model() -> Any:
        far = call("worker1", layer, 1, X)
        return (far * far).sum() + call("worker2", layer, 2, far).sum() + far.prod()

    assert_as_local(mesh, model, LEAVES)


def test_several_roots(mesh: Mesh) -> None:
    def model() -> Any:
        far = call("worker1", layer, 1, X)
        other = call("worker2", layer, 2, X)
        return [far.sum(), (far * other).sum().reshape(1, 1), (X**2).sum()]

    assert_as_local(mesh, model, LEAVES)


def test_the_same_root_twice(mesh: Mesh) -> None:
    def model() -> Any:
        loss = call("worker1", layer, 1, X).sum()
        return [loss, loss]

    assert_as_local(mesh, model, LEAVES)


def test_a_root_that_has_nothing_to_do_with_other_workers(mesh: Mesh) -> None:
    def model() -> Any:
        call("worker1", layer, 1, X)
        return (X**2).sum()

    assert_as_local(mesh, model, LEAVES)


def test_a_context_without_any_message(mesh: Mesh) -> None:
    assert_as_local(mesh, lambda: layer(0, X).sum(), LEAVES)


def test_unused_results(mesh: Mesh) -> None:
    def three(x: Any) -> Any:
        x = layer(1, x)
        return x, x * 2, {"third": x.sin()}

    def ignore(x: Any) -> Any:
        return None

    def model() -> Any:
        call("worker1", ignore, X)
        _, used, _ = call("worker1", three, X)
        call("worker1", layer, 1, used)
        call("worker2", three, used)
        return used.sum()

    assert_as_local(mesh, model, LEAVES)


def test_nothing_that_was_received_is_used(mesh: Mesh) -> None:
    def model() -> Any:
        call("worker1", layer, 1, call("worker2", layer, 2, X))
        return layer(0, X).sum()

    assert_as_local(mesh, model, LEAVES)


def test_unused_arguments(mesh: Mesh) -> None:
    def second(x: Any, y: Any) -> Any:
        return layer(1, y)

    def model() -> Any:
        return call("worker1", second, torch.sin(X), torch.cos(X)).sum()

    assert_as_local(mesh, model, LEAVES)


def test_a_result_that_does_not_depend_on_the_arguments(mesh: Mesh) -> None:
    def model() -> Any:
        return call("worker1", lambda x: (W[1] ** 2).sum(), X)

    assert_as_local(mesh, model, LEAVES)


def test_a_result_that_requires_no_grad_for_arguments_that_do(mesh: Mesh) -> None:
    def model() -> Any:
        return (call("worker1", lambda x: layer(1, x).detach(), X) * X).sum()

    assert_as_local(mesh, model, LEAVES)


def test_a_leaf_that_was_received_outside_of_the_context(mesh: Mesh) -> None:
    """It is a leaf of the worker that received it."""

    def run() -> Any:
        received = zrpc.rpc_sync("worker1", torch.ones, args=(3,), kwargs={"requires_grad": True})
        assert received.is_leaf
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [call("worker1", lambda x: x * 3, received).sum()])
            return dist_autograd.get_gradients(context_id)[received]

    torch.testing.assert_close(mesh.run(0, run), torch.full((3,), 3.0))


def test_a_leaf_that_is_sent_has_its_gradient_at_its_own_worker(mesh: Mesh) -> None:
    """What is received in a context is no leaf."""

    def check(x: Any) -> Any:
        assert not x.is_leaf
        return x * 2

    def run() -> Any:
        with dist_autograd.context() as context_id:
            received = call("worker1", lambda: W[1])
            assert not received.is_leaf
            loss = (call("worker1", check, X) * received.sum()).sum()
            dist_autograd.backward(context_id, [loss])
            return [set(gradients_at(mesh, rank, context_id)) for rank in range(3)]

    assert mesh.run(0, run) == [{X}, {W[1]}, set()]


def test_modules(mesh: Mesh) -> None:
    torch.manual_seed(0)
    there = torch.nn.Sequential(
        torch.nn.Linear(3, 5), torch.nn.LayerNorm(5), torch.nn.GELU(), torch.nn.Linear(5, 3)
    ).double()
    here = torch.nn.LSTM(3, 4, batch_first=True).double()
    inputs = torch.randn(2, 6, 3, dtype=torch.float64)

    def run_there(x: Any) -> Any:
        return there(x)

    def model() -> Any:
        hidden, (h, c) = here(call("worker1", run_there, inputs))
        return torch.nn.functional.mse_loss(hidden, torch.zeros_like(hidden)) + (h * c).sum()

    assert_as_local(mesh, model, [*there.parameters(), *here.parameters()])


def test_leaves_that_require_grad_only_in_part(mesh: Mesh) -> None:
    frozen = torch.ones(3, dtype=torch.float64)

    def model() -> Any:
        return (call("worker1", lambda x, f: x * f, X, frozen) * frozen).sum()

    assert_as_local(mesh, model, LEAVES)
    with pytest.raises(RuntimeError, match="requires_grad not set on root"):
        train(mesh, lambda: call("worker1", torch.sum, frozen))

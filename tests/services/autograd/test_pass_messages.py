"""How many messages a backward pass sends."""

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
    gradients,
    layer,
    local_gradients,
    posted,
    residual,
    settle,
    train,
)
from tests.support.identity import here
from zrpc.optim import DistributedOptimizer
from zrpc.testing import Mesh
from zrpc.wire.kind import Kind

pytestmark = pytest.mark.zrpc(workers=3, timeout=60)


def both(x: Any, y: Any) -> Any:
    return x + y, x * y, [x.sin()]


def number(x: Any) -> Any:
    return x.sum().item()


def test_one_gradient_message_for_each_message_that_leads_to_the_root(mesh: Mesh) -> None:
    def model() -> Any:
        a, b, _ = call("worker1", both, X * 2, X.sin())  # two messages
        call("worker1", number, a)  # none: nothing that was sent leads to the root
        c = call("worker2", lambda: W[2] * 2)  # one: its request carries no tensor
        call("worker2", max, 1, 2)  # none
        call("worker1", torch.add, torch.ones(2), 1)  # none: no tensor requires grad
        return (a * b @ c).sum()

    with posted(mesh) as counts:
        train(mesh, model)
    assert counts[Kind.GRADIENT] == 3
    assert counts[Kind.RELEASE] <= 4
    assert counts[Kind.ABORT] == 0


def test_one_gradient_message_for_each_hop_of_a_residual_chain(mesh: Mesh) -> None:
    with posted(mesh) as counts:
        train(mesh, residual)
    assert counts[Kind.GRADIENT] == 2 * 4


def test_no_messages_without_tensors(mesh: Mesh) -> None:
    def model() -> Any:
        call("worker1", max, 1, 2)
        return (X**2).sum()

    with posted(mesh) as counts:
        train(mesh, model)
    assert counts[Kind.GRADIENT] == 0


def test_no_messages_outside_of_a_context(mesh: Mesh) -> None:
    with posted(mesh) as counts:
        result = mesh.run(0, call, "worker1", layer, 1, X)
        assert result.is_leaf
        assert result.requires_grad
    assert not any(
        counts[kind] for kind in (Kind.GRADIENT, Kind.BACKWARD, Kind.ABORT, Kind.RELEASE)
    )


def test_two_workers_ask_nothing_before_a_pass(mesh: Mesh) -> None:
    """Each message says what its tensors were computed from."""

    def model() -> Any:
        x = layer(0, X)
        for _ in range(3):
            x = layer(0, call("worker1", both, x, X)[0])
        return (x + call("worker2", layer, 2, x)).sum()

    with posted(mesh) as counts:
        train(mesh, model, passes=2)
    assert counts[Kind.DEPENDENCIES] == 0


def test_only_the_senders_of_messages_that_went_elsewhere_are_asked(mesh: Mesh) -> None:
    """Worker1 and worker2, once each, about what they have sent to each other."""

    def there(x: Any) -> Any:
        return layer(1, call("worker2", layer, 2, layer(1, x)))

    with posted(mesh) as counts:
        assert_as_local(mesh, lambda: call("worker1", there, X).sum(), LEAVES)
    assert counts[Kind.DEPENDENCIES] == 2


@pytest.mark.system
def test_a_tensor_of_many_sources(mesh: Mesh) -> None:
    """The message does not say them, so its sender is asked."""

    def model() -> Any:
        total = X
        for _ in range(80):
            total = total + call("worker1", torch.sin, X)
        return call("worker1", layer, 1, call("worker1", layer, 1, total)).sum()

    with posted(mesh) as counts:
        assert_as_local(mesh, model, LEAVES)
    assert counts[Kind.DEPENDENCIES] == 0  # worker1's have one source each

    def at_worker1() -> Any:
        total = X
        for _ in range(80):
            total = total + call("worker0", torch.sin, X)
        return total

    with posted(mesh) as counts:
        assert_as_local(mesh, lambda: call("worker1", at_worker1).sum(), LEAVES)
    assert counts[Kind.DEPENDENCIES] == 1


def test_a_training_step_sends_eleven_messages(mesh: Mesh) -> None:
    """Here, worker1, here, worker1, here: 4 for calls, 4 for gradients, 2 to step, 1 at the end."""

    def step(optimizer: Any) -> None:
        with dist_autograd.context() as context_id:
            x = layer(0, X)
            for _ in range(2):
                x = layer(0, call("worker1", layer, 1, x))
            dist_autograd.backward(context_id, [x.sum()])
            optimizer.step(context_id)

    def arrived() -> int:
        return sum(sum(mesh.agent(name).dispatcher.received.values()) for name in mesh)

    with mesh.agent(0).as_current():
        weight = zrpc.remote("worker1", here(lambda: W[1]))
        optimizer = DistributedOptimizer(torch.optim.SGD, [weight], lr=0.0)
    settle(mesh)
    before = arrived()
    with posted(mesh) as counts:
        mesh.run(0, step, optimizer)
        assert_freed(mesh)
    assert arrived() - before == 11
    assert counts[Kind.CALL] == 2
    assert counts[Kind.GRADIENT] == 4
    assert counts[Kind.METHOD] == 1
    assert counts[Kind.RELEASE] == 1


def test_a_step_sends_one_message_to_each_owner_all_at_once(mesh: Mesh) -> None:
    both = threading.Barrier(2)

    class Together(torch.optim.SGD):
        def step(self, *args: Any) -> Any:
            both.wait(SOON)  # for the other owner
            return super().step(*args)

    def make() -> Any:
        weights = [zrpc.remote(f"worker{rank}", here(lambda rank=rank: W[rank])) for rank in (1, 2)]
        return DistributedOptimizer(here(Together), weights, lr=0.0)

    def step(optimizer: Any) -> None:
        with dist_autograd.context() as context_id:
            loss = call("worker2", layer, 2, call("worker1", layer, 1, X)).sum()
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)

    optimizer = mesh.run(0, make)
    with posted(mesh) as counts:
        mesh.run(0, step, optimizer)
    assert counts[Kind.METHOD] == 2


@pytest.mark.system
def test_what_is_left_of_a_part_may_wait_for_its_last_gradients(caller: Mesh) -> None:
    """A function of the user's waits, at worker1, for worker0 to have used them."""
    used = threading.Event()

    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Any) -> Any:
            return weight * 2

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            assert used.wait(SOON)
            return gradient * 2

    made: list[torch.Tensor] = []

    def make() -> None:
        made.append(Waits.apply(W[1]))

    def use(x: Any) -> Any:
        weight = made.pop()
        weight.grad_fn._set_sequence_nr(1)  # so that x's gradient is sent first
        x.grad_fn._set_sequence_nr(2)
        return x @ weight

    with dist_autograd.context() as context_id:
        call("worker1", make)
        x = layer(0, X)
        x.register_hook(lambda _: used.set())
        dist_autograd.backward(context_id, [call("worker1", use, x).sum()])
        found = gradients(caller, context_id)
    leaves = [X, W[0], W[1]]
    expected = local_gradients(lambda: (layer(0, X) @ (W[1] * 2)).sum(), leaves)
    for leaf, gradient in zip(leaves, expected, strict=True):
        torch.testing.assert_close(found[leaf], gradient)
    assert_freed(caller)

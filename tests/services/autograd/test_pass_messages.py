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
from tests.support.waiting import SOON
from zrpc.optim import DistributedOptimizer
from zrpc.testing import Mesh
from zrpc.wire.kind import Kind

pytestmark = pytest.mark.zrpc(workers=3, timeout=60)


def both(x: Any, y: Any) -> Any:
    return x + y, x * y, [x.sin()]


def test_one_gradient_message_for_each_message_that_leads_to_the_root(mesh: Mesh) -> None:
    def model() -> Any:
        a, b, _ = call("worker1", both, X * 2, X.sin())  # two messages
        call("worker1", torch.Tensor.tolist, a)  # none: nothing that was sent leads to the root
        call("worker2", layer, 2, a)  # none; and worker2 is not asked to take part
        call("worker2", max, 1, 2)  # none
        call("worker1", torch.add, torch.ones(2), 1)  # none: no tensor requires grad
        c = call("worker1", lambda: W[1] * 2)  # one: its request carries no tensor
        return (a * b @ c).sum()

    with posted(mesh) as counts:
        assert_as_local(mesh, model, LEAVES)
    assert counts[Kind.GRADIENT] == 3
    assert counts[Kind.BACKWARD] == 1
    assert counts[Kind.RELEASE] <= 4
    assert counts[Kind.ABORT] == 0
    with posted(mesh) as counts:
        train(mesh, residual)
    assert counts[Kind.GRADIENT] == 2 * 4


def test_no_messages_without_tensors_or_a_context(mesh: Mesh) -> None:
    def model() -> Any:
        call("worker1", max, 1, 2)
        return (X**2).sum()

    with posted(mesh) as counts:
        train(mesh, model)
    assert not counts[Kind.GRADIENT]
    assert not counts[Kind.BACKWARD]
    with posted(mesh) as counts:
        result = mesh.run(0, call, "worker1", layer, 1, X)
        assert result.is_leaf
        assert result.requires_grad
    assert not set(counts) & {Kind.GRADIENT, Kind.BACKWARD, Kind.ABORT, Kind.RELEASE}


def total_of(to: str) -> Any:
    return X + sum(call(to, torch.sin, X) for _ in range(80))


def back_and_forth() -> Any:
    x = layer(0, X)
    for _ in range(3):
        x = layer(0, call("worker1", both, x, X)[0])
    return (x + call("worker2", layer, 2, x)).sum()


def through_two() -> Any:
    def there(x: Any) -> Any:
        return layer(1, call("worker2", layer, 2, layer(1, x)))

    return call("worker1", there, X).sum()


def many_sources() -> Any:
    return call("worker1", layer, 1, call("worker1", layer, 1, total_of("worker1"))).sum()


ASKED = {
    back_and_forth: 0,  # each message says what its tensors were computed from
    # In each pass, worker1 and worker2, about what they have sent to each other.
    through_two: 2 * 2,
    many_sources: 0,  # worker1's have one source each
    lambda: call("worker1", total_of, "worker0").sum(): 2 * 1,  # the message does not say them
}


@pytest.mark.system
@pytest.mark.parametrize("model", ASKED)
def test_only_senders_whose_messages_are_not_known_are_asked(mesh: Mesh, model: Any) -> None:
    with posted(mesh) as counts:
        assert_as_local(mesh, model, LEAVES, passes=2)
    assert counts[Kind.DEPENDENCIES] == ASKED[model]


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


def test_a_step_sends_one_message_to_each_owner_all_at_once(caller: Mesh) -> None:
    both = threading.Barrier(2)

    class Together(torch.optim.SGD):
        def step(self, *args: Any) -> Any:
            both.wait(SOON)  # for the other owner
            return super().step(*args)

    weights = [zrpc.remote(f"worker{rank}", here(lambda rank=rank: W[rank])) for rank in (1, 2)]
    optimizer = DistributedOptimizer(here(Together), weights, lr=0.0)
    with posted(caller) as counts, dist_autograd.context() as context_id:
        loss = call("worker2", layer, 2, call("worker1", layer, 1, X)).sum()
        dist_autograd.backward(context_id, [loss])
        optimizer.step(context_id)
    assert counts[Kind.METHOD] == 2


@pytest.mark.system
def test_what_is_left_of_a_part_may_wait_for_its_last_gradients(caller: Mesh) -> None:
    """A hook of the user's waits, at worker1, for worker0 to have used them."""
    used = threading.Event()
    made: list[Any] = []

    def wait(_: Any) -> None:
        assert used.wait(SOON)

    def make() -> None:
        made.append(W[1] * 2)
        made[0].register_hook(wait)

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
    torch.testing.assert_close([found[each] for each in leaves], expected)
    assert_freed(caller)

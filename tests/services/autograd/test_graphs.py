"""Gradients across workers equal those of the same model in one process, for graphs of any form."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

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
    gradients_at,
    layer,
    leaf,
    local_gradients,
    posted,
    train,
)
from tests.support.identity import here
from zrpc.agent.current import find_agent
from zrpc.testing import Mesh
from zrpc.wire.kind import Kind

pytestmark = pytest.mark.zrpc(workers=3, timeout=60)


def test_the_same_leaf_at_two_workers(caller: Mesh) -> None:
    """Their gradients are held apart, each by the worker that used it."""
    with dist_autograd.context() as context_id:
        loss = (call("worker1", layer, 1, X @ W[1])).sum()
        dist_autograd.backward(context_id, [loss])
        here, there, nowhere = [gradients_at(caller, rank, context_id) for rank in range(3)]
    [expected] = local_gradients(lambda: layer(1, X @ W[1]).sum(), [W[1]])
    torch.testing.assert_close(here[W[1]] + there[W[1]], expected)
    assert X in here
    assert X not in there
    assert nowhere == {}


def test_a_context_without_any_message(mesh: Mesh) -> None:
    assert_as_local(mesh, lambda: layer(0, X).sum(), LEAVES)


def test_a_leaf_that_was_received_outside_of_the_context(caller: Mesh) -> None:
    """It is a leaf of the worker that received it."""
    received = zrpc.rpc_sync("worker1", torch.ones, args=(3,), kwargs={"requires_grad": True})
    assert received.is_leaf
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [call("worker1", lambda x: x * 3, received).sum()])
        torch.testing.assert_close(
            dist_autograd.get_gradients(context_id)[received], torch.full((3,), 3.0)
        )


def test_a_leaf_that_is_sent_has_its_gradient_at_its_own_worker(caller: Mesh) -> None:
    """What is received in a context is no leaf."""

    def check(x: Any) -> Any:
        assert not x.is_leaf
        return x * 2

    with dist_autograd.context() as context_id:
        received = call("worker1", lambda: W[1])
        assert not received.is_leaf
        loss = (call("worker1", check, X) * received.sum()).sum()
        dist_autograd.backward(context_id, [loss])
        assert [set(gradients_at(caller, rank, context_id)) for rank in range(3)] == [
            {X},
            {W[1]},
            set(),
        ]


def test_a_second_pass_over_a_graph_that_is_kept_adds_up(mesh: Mesh) -> None:
    def model() -> Any:
        x = layer(0, X)
        return (x + call("worker1", layer, 1, call("worker2", layer, 2, x))).sum()

    assert_as_local(mesh, model, LEAVES, passes=3)


def test_a_second_pass_over_a_graph_that_is_gone(caller: Mesh) -> None:
    with dist_autograd.context() as context_id:
        loss = call("worker1", layer, 1, X).sum()
        dist_autograd.backward(context_id, [loss])
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            dist_autograd.backward(context_id, [loss])


def test_forward_and_backward_twice_in_one_context(caller: Mesh) -> None:
    """Each loss has a graph of its own, so nothing need be kept."""
    with dist_autograd.context() as context_id:
        for factor in (1, 2, 3):
            x = layer(0, X * factor)
            loss = (x + call("worker1", layer, 1, call("worker2", layer, 2, x))).sum()
            dist_autograd.backward(context_id, [loss])
        found = [gradients_at(caller, rank, context_id) for rank in range(3)]

    def model() -> Any:
        xs = [layer(0, X * factor) for factor in (1, 2, 3)]
        return sum((x + layer(1, layer(2, x))).sum() for x in xs)

    expected = local_gradients(model, LEAVES)
    torch.testing.assert_close(
        [found[0][X], found[0][W[0]], found[1][W[1]], found[2][W[2]]], expected
    )


def checkpointed(rank: Any, x: Any, **options: Any) -> Any:
    return checkpoint(layer, rank, x, **options)


def test_checkpoints_within_a_remote_stage(mesh: Mesh) -> None:
    def model() -> Any:
        x = call("worker1", checkpointed, 1, X * 2, use_reentrant=False)
        return (checkpointed(0, x, use_reentrant=False) * x).sum()

    assert_as_local(mesh, model, LEAVES)


def test_a_remote_stage_within_a_checkpoint(mesh: Mesh) -> None:
    def stage(x: Any) -> Any:
        return call("worker1", layer, 1, x.sin()).sin()

    def model() -> Any:
        return checkpoint(stage, X * 2, use_reentrant=False).sum()

    assert_as_local(mesh, model, LEAVES)


def test_reentrant_checkpoints_are_refused_by_torch(mesh: Mesh) -> None:
    def model() -> Any:
        return call("worker1", checkpointed, 1, X * 2, use_reentrant=True).sum()

    with pytest.raises(RuntimeError, match=r"(?s)Error on Node 1.*use_reentrant"):
        train(mesh, model)
    assert_as_local(mesh, lambda: call("worker1", layer, 1, X).sum(), LEAVES)


def test_changes_in_place_to_what_was_received(mesh: Mesh) -> None:
    def change(x: Any, y: Any) -> Any:
        x.mul_(2).add_(y)
        y[0] = x[1]
        return x, y

    def model() -> Any:
        x, y = call("worker1", change, X * 1, X.sin())
        x += y
        y.clamp_(-0.5, 0.5)
        return (x * y).sum()

    assert_as_local(mesh, model, LEAVES)


def test_a_change_in_place_to_what_was_sent(mesh: Mesh) -> None:
    """The message has a copy, so the change does not reach it."""

    def model() -> Any:
        x = X * 2
        far = call("worker1", torch.sin, x)
        x.add_(far)
        return (x * far).sum()

    assert_as_local(mesh, model, LEAVES)


def test_a_change_in_place_to_what_backward_needs_is_found(mesh: Mesh) -> None:
    def model() -> Any:
        x = call("worker1", torch.exp, X)
        y = x.exp()
        y.add_(1)
        return y.sum()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        train(mesh, model)


def test_sections_without_grad(mesh: Mesh) -> None:
    """A tensor that is sent within ``no_grad`` is not followed from there on."""

    def model() -> Any:
        x = layer(0, X)
        with torch.no_grad():
            constant = call("worker1", torch.sin, x)
        return (call("worker1", layer, 1, x) * constant.detach()).sum()

    assert_as_local(mesh, model, LEAVES)


class Shifted:
    """A value that torch computes on where it arrives."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __reduce__(self) -> Any:
        return _shifted, (self.tensor,)


def _shifted(tensor: Any) -> Any:
    return Shifted(tensor + 1)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_result_that_is_waited_for_without_grad(mesh: Mesh, mode: Any) -> None:
    def compute(x: Any) -> Any:
        return Shifted(layer(1, x))

    def model() -> Any:
        if find_agent() is None:
            return (_shifted(layer(1, X)).tensor ** 2).sum()
        future = zrpc.rpc_async("worker1", here(compute), (X,))
        with mode():
            result = future.wait()
        return (result.tensor**2).sum()

    assert_as_local(mesh, model, LEAVES)


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


def check(found: Any) -> None:
    for at, expected in zip(LEAVES, local_gradients(model, LEAVES), strict=True):
        torch.testing.assert_close(found[at], expected)


@DEFAULTS
def test_defaults_where_a_pass_begins(caller: Mesh, defaults: Any) -> None:
    with defaults(), dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [model()])
        check(gradients(caller, context_id))
    assert_freed(caller)


@DEFAULTS
def test_defaults_of_a_handler(mesh: Mesh, defaults: Any) -> None:
    def there(x: Any) -> Any:
        with defaults():
            return there_and_back(x)

    check(train(mesh, lambda: (lambda x: (x + call("worker1", there, x)).sum())(layer(0, X))))


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


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        raise ValueError("run by mistake")


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


BRANCHES = [trained, changed_in_place, broken, hooked]


@pytest.mark.parametrize("branch", BRANCHES)
def test_a_branch_in_one_message_with_what_is_used(mesh: Mesh, branch: Any) -> None:
    def there(x: Any) -> Any:
        return branch(x), layer(1, x), branch(x)

    def model() -> Any:
        _, x, _ = call("worker1", there, X)
        _, x, _ = call("worker1", there, x)
        return x.sum()

    assert_as_local(mesh, model, LEAVES)


def test_parameters_of_unused_branches_have_no_gradient(caller: Mesh) -> None:
    with dist_autograd.context() as context_id:
        call("worker1", layer, 1, X)
        loss = call("worker2", layer, 2, X).sum()
        dist_autograd.backward(context_id, [loss])
        assert [set(gradients_at(caller, rank, context_id)) for rank in range(3)] == [
            {X},
            set(),
            {W[2]},
        ]


def test_workers_without_a_part_are_not_asked_to_take_one(mesh: Mesh) -> None:
    def model() -> Any:
        call("worker1", layer, 1, X)
        return call("worker2", layer, 2, X).sum()

    with posted(mesh) as counts:
        assert_as_local(mesh, model, LEAVES)
    assert counts[Kind.BACKWARD] == 1


def test_an_unused_branch_can_have_a_pass_of_its_own_later(caller: Mesh) -> None:
    """The first pass neither runs nor frees it."""
    [expected] = torch.autograd.grad(W[1].sin().sum() + W[1].exp().sum(), [W[1]])
    with dist_autograd.context() as context_id:
        first, second = call("worker1", lambda: (W[1].sin(), W[1].exp()))
        dist_autograd.backward(context_id, [first.sum()])
        dist_autograd.backward(context_id, [second.sum()])
        torch.testing.assert_close(gradients_at(caller, 1, context_id)[W[1]], expected)


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

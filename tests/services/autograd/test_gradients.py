"""Gradients across workers equal those of the same model in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

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
    leaf,
    local_gradients,
    train,
)
from tests.support.identity import here
from zrpc.agent.current import find_agent
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


VIEWS = {
    "slice": lambda x: x[1:],
    "row": lambda x: x[1],
    "transposed": lambda x: x.t(),
    "strided": lambda x: x[::2, ::2],
    "expanded": lambda x: x[0].expand(4, 3),
    "diagonal": lambda x: x.diagonal(),
    "reshaped": lambda x: x.view(9),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_views_there_and_back(mesh: Mesh, view: Any) -> None:
    def model() -> Any:
        sent = view(torch.tanh(W[0]))
        back = call("worker1", lambda x: (x * 3).sin()[..., :2], sent)
        return (back**2).sum()

    assert_as_local(mesh, model, LEAVES)


def test_a_view_of_a_leaf(mesh: Mesh) -> None:
    assert_as_local(mesh, lambda: call("worker1", torch.sin, W[0][1]).sum(), LEAVES)


def test_a_tensor_and_views_of_it_in_one_message(mesh: Mesh) -> None:
    def use(base: Any, row: Any, column: Any) -> Any:
        return (base.sin().sum() * row * column).sum()

    def model() -> Any:
        base = torch.tanh(W[0])
        return call("worker1", use, base, base[0], base[:, 1])

    assert_as_local(mesh, model, LEAVES)


def test_a_tensor_twice_in_one_message(mesh: Mesh) -> None:
    def model() -> Any:
        x = X * 2
        return call("worker1", lambda a, b, c: (a * b * c[0]).sum(), x, x, [x])

    assert_as_local(mesh, model, LEAVES)


def test_results_that_share_storage(mesh: Mesh) -> None:
    def parts(x: Any) -> Any:
        whole = layer(1, x)
        return whole, whole[:2], whole.view(3, 1)

    def model() -> Any:
        whole, head, column = call("worker1", parts, X)
        return (whole.sin() * column).sum() + head.prod()

    assert_as_local(mesh, model, LEAVES)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float32, {"rtol": 1e-5, "atol": 1e-6}),
        (torch.float64, {}),
        (torch.bfloat16, {"rtol": 0.02, "atol": 0.02}),
        (torch.float16, {"rtol": 1e-2, "atol": 1e-2}),
        (torch.complex64, {"rtol": 1e-5, "atol": 1e-5}),
        (torch.complex128, {}),
    ],
    ids=str,
)
def test_dtypes(mesh: Mesh, dtype: Any, tolerance: Any) -> None:
    x, w = leaf(3, seed=2, dtype=dtype), leaf(3, 3, seed=3, dtype=dtype)

    def model() -> Any:
        far = call("worker1", lambda x: (x @ w) * x, x * 2)
        assert far.dtype == dtype
        return far.abs().sum() if dtype.is_complex else far.sum()

    assert_as_local(mesh, model, [x, w], **tolerance)


def test_mixed_dtypes_in_one_message(mesh: Mesh) -> None:
    a, b = leaf(3, seed=2, dtype=torch.float32), leaf(3, seed=3, dtype=torch.complex128)

    def use(x: Any, half: Any, z: Any, index: Any) -> Any:
        return (x.double()[index] * half.double() * z.real + z.imag).sum()

    def model() -> Any:
        return call("worker1", use, a, a.bfloat16(), b * 1j, torch.tensor([2, 0, 1]))

    assert_as_local(mesh, model, [a, b], rtol=1e-2, atol=1e-2)


def test_conjugates_and_negatives(mesh: Mesh) -> None:
    z = leaf(3, seed=4, dtype=torch.complex128)

    def use(conjugate: Any, negative: Any) -> Any:
        assert conjugate.is_conj() or find_agent() is None
        return (conjugate * 1j).real.sum() + (negative**2).sum()

    def model() -> Any:
        return call("worker1", use, z.conj(), z.conj().imag)

    assert_as_local(mesh, model, [z])


def test_shapes_without_elements_and_scalars(mesh: Mesh) -> None:
    scalar, empty = leaf(seed=5), leaf(0, 3, seed=6)

    def model() -> Any:
        a, b = call("worker1", lambda s, e: (s * s, e * s), scalar, empty)
        return a + b.sum()

    assert_as_local(mesh, model, [scalar, empty])


def test_large_tensors(mesh: Mesh) -> None:
    """They travel as frames of their own."""
    big = leaf(200, 300, seed=7)

    def model() -> Any:
        return (call("worker1", lambda x: x.sin() * 2, big * 2) ** 2).sum()

    assert_as_local(mesh, model, [big])


def test_an_embedding_with_sparse_gradients(mesh: Mesh) -> None:
    embedding = torch.nn.Embedding(10, 3, sparse=True, dtype=torch.float64)

    def model() -> Any:
        rows = call("worker1", embedding.forward_rows, torch.tensor([1, 3, 1]))
        return (rows * X).sum() + call("worker1", embedding.forward_rows, torch.tensor([7])).sum()

    embedding.forward_rows = lambda rows: torch.nn.functional.embedding(
        rows, embedding.weight, sparse=True
    )
    assert_as_local(mesh, model, [X, embedding.weight])
    assert train(mesh, model)[embedding.weight].is_sparse


def test_a_sparse_gradient_that_travels(mesh: Mesh) -> None:
    """The worker that looks the rows up is not the one that has the weight."""

    def look_up(weight: Any) -> Any:
        return torch.nn.functional.embedding(torch.tensor([1, 2, 1]), weight, sparse=True)

    def model() -> Any:
        return (call("worker1", look_up, W[0]) * X).sum()

    assert_as_local(mesh, model, LEAVES)


def test_a_sparse_activation(mesh: Mesh) -> None:
    """A sparse tensor that requires grad is part of the graph too."""

    def model() -> Any:
        sparse = (W[0] * torch.eye(3, dtype=torch.float64)).to_sparse()
        return (call("worker1", torch.sparse.mm, sparse, W[1]) ** 2).sum()

    assert_as_local(mesh, model, LEAVES)


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


def test_changes_in_place_to_large_tensors_that_were_received(mesh: Mesh) -> None:
    big = leaf(100, 100, seed=8)

    def model() -> Any:
        x = call("worker1", lambda x: x.mul_(3), big * 2)
        x[0] *= 2
        return x.sin_().sum()

    assert_as_local(mesh, model, [big])


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


def test_a_second_pass_over_a_graph_that_is_kept_adds_up(mesh: Mesh) -> None:
    def model() -> Any:
        x = layer(0, X)
        return (x + call("worker1", layer, 1, call("worker2", layer, 2, x))).sum()

    assert_as_local(mesh, model, LEAVES, passes=3)


def test_a_second_pass_over_a_graph_that_is_gone(mesh: Mesh) -> None:
    def run() -> None:
        with dist_autograd.context() as context_id:
            loss = call("worker1", layer, 1, X).sum()
            dist_autograd.backward(context_id, [loss])
            dist_autograd.backward(context_id, [loss])

    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        mesh.run(0, run)


def test_a_second_forward_after_a_pass(mesh: Mesh) -> None:
    """What was sent before is told to be unused, where its graph is kept."""

    def run() -> Any:
        with dist_autograd.context() as context_id:
            first = call("worker1", layer, 1, X).sum()
            dist_autograd.backward(context_id, [first], retain_graph=True)
            second = call("worker1", layer, 1, X * 2).sum()
            dist_autograd.backward(context_id, [second])
            return gradients_at(mesh, 0, context_id)[X], gradients_at(mesh, 1, context_id)[W[1]]

    found = mesh.run(0, run)
    expected = local_gradients(lambda: layer(1, X).sum() + layer(1, X * 2).sum(), [X, W[1]])
    torch.testing.assert_close(list(found), expected)


def test_forward_and_backward_twice_in_one_context(mesh: Mesh) -> None:
    """Each loss has a graph of its own, so nothing need be kept."""

    def run() -> Any:
        with dist_autograd.context() as context_id:
            for factor in (1, 2, 3):
                x = layer(0, X * factor)
                loss = (x + call("worker1", layer, 1, call("worker2", layer, 2, x))).sum()
                dist_autograd.backward(context_id, [loss])
            return [gradients_at(mesh, rank, context_id) for rank in range(3)]

    found = mesh.run(0, run)

    def model() -> Any:
        xs = [layer(0, X * factor) for factor in (1, 2, 3)]
        return sum((x + layer(1, layer(2, x))).sum() for x in xs)

    expected = local_gradients(model, LEAVES)
    torch.testing.assert_close(
        [found[0][X], found[0][W[0]], found[1][W[1]], found[2][W[2]]], expected
    )


def two_losses(mesh: Mesh, keep: Any) -> Any:
    def run() -> Any:
        with dist_autograd.context() as context_id:
            losses = [call("worker1", layer, 1, X * factor).sum() for factor in (1, 2)]
            for loss in losses:
                dist_autograd.backward(context_id, [loss], retain_graph=keep)
            return gradients_at(mesh, 0, context_id)[X], gradients_at(mesh, 1, context_id)[W[1]]

    return mesh.run(0, run)


def test_two_graphs_and_then_two_passes(mesh: Mesh) -> None:
    """A pass frees only what leads to its roots."""
    expected = local_gradients(lambda: (layer(1, X) + layer(1, X * 2)).sum(), [X, W[1]])
    for keep in (True, False):
        torch.testing.assert_close(list(two_losses(mesh, keep)), expected)


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


def test_sections_without_grad(mesh: Mesh) -> None:
    """A tensor that is sent within ``no_grad`` is not followed from there on."""

    def model() -> Any:
        x = layer(0, X)
        with torch.no_grad():
            constant = call("worker1", torch.sin, x)
        return (call("worker1", layer, 1, x) * constant.detach()).sum()

    assert_as_local(mesh, model, LEAVES)


def test_sections_without_grad_at_the_callee(mesh: Mesh) -> None:
    def half(x: Any) -> Any:
        with torch.no_grad():
            y = layer(1, x)
        return x * y + call("worker2", layer, 2, x)

    assert_as_local(mesh, lambda: call("worker1", half, X).sum(), LEAVES)


def test_grad_enabled_within_no_grad(mesh: Mesh) -> None:
    def model() -> Any:
        with torch.no_grad(), torch.enable_grad():
            return call("worker1", layer, 1, X).sum()

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

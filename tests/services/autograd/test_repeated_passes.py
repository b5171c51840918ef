"""Several forward and backward passes in one context."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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
)
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=3, timeout=60)


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

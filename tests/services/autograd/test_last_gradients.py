"""The gradients that a part computes last travel with its answer, unless that takes long."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import zrpc.autograd as dist_autograd
from tests.services.autograd.split_models import (
    SOON,
    W,
    X,
    assert_freed,
    call,
    gradients,
    layer,
    local_gradients,
)
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=2, timeout=60)


@pytest.mark.system
def test_what_is_left_of_a_part_may_wait_for_its_last_gradients(mesh: Mesh) -> None:
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

    def run() -> Any:
        with dist_autograd.context() as context_id:
            call("worker1", make)
            x = layer(0, X)
            x.register_hook(lambda _: used.set())
            dist_autograd.backward(context_id, [call("worker1", use, x).sum()])
            return gradients(mesh, context_id)

    found = mesh.run(0, run)
    leaves = [X, W[0], W[1]]
    expected = local_gradients(lambda: (layer(0, X) @ (W[1] * 2)).sum(), leaves)
    for leaf, gradient in zip(leaves, expected, strict=True):
        torch.testing.assert_close(found[leaf], gradient)
    assert_freed(mesh)

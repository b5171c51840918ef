"""A model with parameters at both sides of a call, and the gradients that are expected."""

from __future__ import annotations

from typing import Any

import torch

import zrpc.autograd as dist_autograd
from tests.services.autograd.split_models import (
    W,
    X,
    assert_freed,
    gradients_at,
    layer,
)
from zrpc.testing import Mesh


def both(x: Any) -> Any:
    return layer(1, x)


EXPECTED = torch.autograd.grad((both(X.sin()) * 2).sum(), [X, W[1]])


def assert_expected(mesh: Mesh, model: Any, to: int = 1) -> None:
    """The model must be ``(both(X.sin()) * 2).sum()`` in some way."""

    def run() -> Any:
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [model()])
            return [gradients_at(mesh, rank, context_id) for rank in range(3)]

    found = mesh.run(0, run)
    torch.testing.assert_close([found[0][X], found[to][W[1]]], list(EXPECTED))
    assert X.grad is None
    assert W[1].grad is None
    assert_freed(mesh)


def run_module(module: Any, x: Any) -> Any:
    return both(module(x))


class Carrier:
    """An object of a user that holds a tensor."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def both(self) -> Any:
        return both(self.x)

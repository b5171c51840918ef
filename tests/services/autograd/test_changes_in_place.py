"""Tensors that are changed in place before or after they travel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.services.autograd.split_models import (
    LEAVES,
    X,
    assert_as_local,
    call,
    leaf,
    train,
)
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=3, timeout=60)


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

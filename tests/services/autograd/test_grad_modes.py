"""Sections with and without grad, at the caller and at the callee."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zrpc
from tests.services.autograd.split_models import (
    LEAVES,
    X,
    assert_as_local,
    call,
    layer,
)
from tests.support.identity import here
from zrpc.agent.current import find_agent
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=3, timeout=60)


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

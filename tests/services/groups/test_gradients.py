"""Calls of groups in an autograd context."""

from __future__ import annotations

import pytest
import torch

import zrpc
from zrpc import autograd
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=4, timeout=90, options={"rpc_timeout": 40})


def scaled(tensor: torch.Tensor, factor: float, constant: torch.Tensor) -> torch.Tensor:
    return tensor * factor + constant


def test_gradients_flow_through_a_call_of_a_group(joined: Mesh) -> None:
    weight = torch.ones(3, requires_grad=True)
    constant = torch.ones(3)
    with autograd.context() as context:
        results = zrpc.rpc_sync(
            zrpc.group("*"), scaled, (weight, zrpc.each([1.0, 2.0, 3.0, 4.0]), constant)
        )
        autograd.backward(context, [torch.stack(results).sum()])
        assert autograd.get_gradients(context)[weight].tolist() == [10.0] * 3


def test_gradients_of_parts(joined: Mesh) -> None:
    weight = torch.arange(8.0, requires_grad=True)
    with autograd.context() as context:
        results = zrpc.rpc_sync(zrpc.group("*"), torch.square, (zrpc.split(weight),))
        autograd.backward(context, [torch.cat(results).sum()])
        assert torch.equal(autograd.get_gradients(context)[weight], 2 * weight.detach())


def test_gradients_through_methods(joined: Mesh) -> None:
    class Scale:
        def __init__(self, factor: float) -> None:
            self.factor = factor

        def apply(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor * self.factor

    values = zrpc.remote(zrpc.group("*"), Scale, (zrpc.each([1.0, 2.0, 3.0, 4.0]),))
    weight = torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        results = values.rpc_async().apply(weight).wait()
        autograd.backward(context, [torch.stack(results).sum()])
        assert autograd.get_gradients(context)[weight].tolist() == [10.0] * 2


def test_a_value_that_several_members_get_has_gradients(joined: Mesh) -> None:
    one = torch.ones(2, requires_grad=True)
    other = torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        values = zrpc.each([one, other, one, other])
        results = zrpc.rpc_sync(zrpc.group("*"), torch.neg, (values,))
        autograd.backward(context, [torch.stack(results).sum()])
        assert autograd.get_gradients(context)[one].tolist() == [-2.0] * 2


def test_outside_of_a_context_leaves_arrive(joined: Mesh) -> None:
    weight = torch.ones(2, requires_grad=True)
    found = zrpc.rpc_sync(zrpc.group("*"), lambda t: (t.is_leaf, t.requires_grad), (weight,))
    assert found == [(True, True)] * 4

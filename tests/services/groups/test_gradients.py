"""Calls of groups in an autograd context."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import zrpc
from zrpc import autograd
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=4, timeout=90, options={"rpc_timeout": 40})


class Scale:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def apply(self, tensor: torch.Tensor, constant: float = 0) -> torch.Tensor:
        return tensor * self.factor + constant


def test_gradients_flow_through_calls_of_groups(caller: Mesh) -> None:
    group, other = zrpc.group("*"), torch.ones(4, requires_grad=True)
    values = zrpc.remote(group, Scale, (zrpc.each([1.0, 2.0, 3.0, 4.0]),))
    calls: list[tuple[Callable[[torch.Tensor], Any], list[float]]] = [
        (lambda x: zrpc.rpc_sync(group, torch.mul, (x, zrpc.each([1, 2, 3, 4]))), [10.0] * 4),
        (lambda x: values.rpc_async().apply(x, constant=torch.ones(4)).wait(), [10.0] * 4),
        (lambda x: zrpc.rpc_sync(group, torch.square, (zrpc.split(x),)), [0.0, 2.0, 4.0, 6.0]),
        # A value that several members get.
        (
            lambda x: zrpc.rpc_sync(group, torch.neg, (zrpc.each([x, other, x, other]),)),
            [-2.0] * 4,
        ),
    ]
    for call, expected in calls:
        weight = torch.arange(4.0, requires_grad=True)
        with autograd.context() as context:
            autograd.backward(context, [torch.cat(call(weight)).sum()])
            assert autograd.get_gradients(context)[weight].tolist() == expected


def test_outside_of_a_context_leaves_arrive(caller: Mesh) -> None:
    weight = torch.ones(2, requires_grad=True)
    found = zrpc.rpc_sync(zrpc.group("*"), lambda t: (t.is_leaf, t.requires_grad), (weight,))
    assert found == [(True, True)] * 4

"""Handlers that compute on an accelerator: torch's engine has a thread of its own for it."""

from __future__ import annotations

import os
from typing import Any

import torch

import zrpc.autograd as dist_autograd
from tests.services.autograd.split_models import call, gradients, leaf
from tests.support.pretended import empty
from zrpc.services.autograd import part
from zrpc.testing import local_mesh


class Double(torch.autograd.Function):
    """Runs backward in the accelerator's thread; the values stay here."""

    @staticmethod
    def forward(ctx: Any, x: Any, values: Any) -> Any:
        values.append(x.detach() * 2)
        ctx.values = values
        return empty(tuple(x.shape), x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        assert gradient.device.type == "pretended"
        return ctx.values.pop() * 2, None


class Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, values: Any) -> Any:
        ctx.values = values
        return values.pop()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        ctx.values.append(gradient)
        return empty(tuple(gradient.shape), gradient.dtype), None


def doubled(x: Any) -> Any:
    values: list[Any] = []
    return Fetch.apply(Double.apply(x, values), values)


def broken(x: Any) -> Any:
    y = doubled(x)
    y.register_hook(lambda gradient: 1 / 0)
    return y


X = leaf(3)


def run(there: Any) -> Any:
    with dist_autograd.context() as context_id:
        x = doubled(X)
        for _ in range(3):
            x = doubled(x + call("worker1", doubled, doubled(x)))
        x = doubled(there(x))
        dist_autograd.backward(context_id, [x.sum()])
        return gradients(mesh, context_id)[X].tolist()


with local_mesh(2, timeout=60) as mesh:
    print(mesh.run(0, run, doubled), flush=True)
    part.ACCELERATOR_SECONDS = 0.5
    try:
        mesh.run(0, run, broken)
    except ZeroDivisionError:
        print("not without limit", flush=True)

# Not by the interpreter's usual end: the accelerator's thread, which nothing joins, would abort the
# process if it freed a Python object then. Plain torch has that fault too.
os._exit(0)

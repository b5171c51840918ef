"""Handlers that compute on an accelerator: torch's engine has a thread of its own for it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from tests.support.warm import warm_commands

ROOT = Path(__file__).parents[3]
PROGRAM = f"""
import os
import sys
import torch
sys.path.insert(0, {str(ROOT)!r})  # for this test's own modules
"""
PROGRAM += """
import zrpc.autograd as dist_autograd
from tests.services.autograd.split_models import call, gradients_at, leaf
from tests.support.pretended import empty
from zrpc.services.autograd import part
from zrpc.testing import local_mesh


class Double(torch.autograd.Function):
    \"\"\"Runs backward in the accelerator's thread; the values stay here.\"\"\"

    @staticmethod
    def forward(ctx, x, values):
        values.append(x.detach() * 2)
        ctx.values = values
        return empty(tuple(x.shape), x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        assert gradient.device.type == "pretended"
        return ctx.values.pop() * 2, None


class Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, values):
        ctx.values = values
        return values.pop()

    @staticmethod
    def backward(ctx, gradient):
        ctx.values.append(gradient)
        return empty(tuple(gradient.shape), gradient.dtype), None


def doubled(x):
    values = []
    return Fetch.apply(Double.apply(x, values), values)


def broken(x):
    y = doubled(x)
    y.register_hook(lambda gradient: 1 / 0)
    return y


X = leaf(3)


def run(there):
    with dist_autograd.context() as context_id:
        x = doubled(X)
        for _ in range(3):
            x = doubled(x + call("worker1", doubled, doubled(x)))
        x = doubled(there(x))
        dist_autograd.backward(context_id, [x.sum()])
        return gradients_at(mesh, 0, context_id)[X]


with local_mesh(2, timeout=60) as mesh:
    found = mesh.run(0, run, doubled)
    torch.testing.assert_close(found, torch.full((3,), 8 * 10.0**3, dtype=torch.float64))
    part.ACCELERATOR_SECONDS = 0.5
    try:
        mesh.run(0, run, broken)
    except ZeroDivisionError:
        print("as expected", flush=True)

# Not by the interpreter's usual end: the accelerator's thread, which nothing joins, would abort the
# process if it freed a Python object then. Plain torch has that fault too.
os._exit(0)
"""


@pytest.mark.system
@pytest.mark.skipif(
    not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch can't pretend an accelerator",
)
def test_a_pass_goes_on_while_an_accelerator_computes(tmp_path: Path) -> None:
    """No thread waits for another worker before it has run what the accelerator has made ready.

    Nor without limit, if a node has failed meanwhile.
    """
    script = tmp_path / "accelerator.py"
    script.write_text(PROGRAM)
    found = subprocess.run(
        [warm_commands().python, str(script)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert found.stdout == "as expected\n", found.stdout + found.stderr

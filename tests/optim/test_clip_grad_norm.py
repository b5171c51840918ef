"""clip_grad_norm_ bounds the norm of gradients over all workers."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import zrpc
import zrpc.autograd as dist_autograd
from tests.optim.remote_parameters import (
    PARAMETERS,
    Parameter,
    gradients,
    make,
    refer,
    use,
)
from tests.support.warm import warm_commands
from zrpc.optim import clip_grad_norm_
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=3, timeout=60)


ROOT = Path(__file__).parents[2]
Clipped = tuple[torch.Tensor, list[Any]]


def clip_both(
    mesh: Mesh, factors: list[float | None], max_norm: float, norm_type: float = 2.0
) -> tuple[Clipped, Clipped]:
    """Returns norm and gradients of zrpc, for parameters of several workers, and of torch."""
    owners = [1, 0, 2, 1][: len(factors)]

    def run() -> Clipped:
        rrefs = [make(f"w{i}", owner) for i, owner in enumerate(owners)]
        with dist_autograd.context() as context_id:
            used = [(rref, by) for rref, by in zip(rrefs, factors, strict=True) if by is not None]
            if used:
                losses = [zrpc.rpc_sync(rref.owner(), use, (rref, by)) for rref, by in used]
                dist_autograd.backward(context_id, losses)
            norm = clip_grad_norm_(context_id, rrefs, max_norm, norm_type)
            return norm, [gradients(rref, context_id) for rref in rrefs]

    found = mesh.run(0, run)
    locals_ = [torch.ones(3, dtype=torch.float64, requires_grad=True) for _ in factors]
    for weight, by in zip(locals_, factors, strict=True):
        weight.grad = None if by is None else torch.full_like(weight, by)
    norm = torch.nn.utils.clip_grad_norm_(locals_, max_norm, norm_type)
    return found, (norm, [weight.grad for weight in locals_])


@pytest.mark.parametrize(
    "norm_type",
    [2.0, 1.0, 3.0, float("inf"), 0.0],
)
@pytest.mark.parametrize("max_norm", [0.5, 1000.0])
def test_clipping_equals_that_of_torch(mesh: Mesh, norm_type: float, max_norm: float) -> None:
    (norm, found), (expected_norm, expected) = clip_both(
        mesh, [1.0, -4.0, 0.25, 3.0], max_norm, norm_type
    )
    torch.testing.assert_close(norm, expected_norm)
    torch.testing.assert_close(found, expected)


def test_a_parameter_without_gradient_does_not_count(mesh: Mesh) -> None:
    (norm, found), (expected_norm, expected) = clip_both(mesh, [1.0, None, 2.0], 0.5)
    torch.testing.assert_close(norm, expected_norm)
    assert found[1] is None
    assert expected[1] is None
    torch.testing.assert_close([found[0], found[2]], [expected[0], expected[2]])


@pytest.mark.parametrize("norm_type", [2.0, 0.0, float("inf"), float("-inf")])
def test_the_norm_of_no_gradients_is_0(mesh: Mesh, norm_type: float) -> None:
    (norm, found), (expected_norm, _) = clip_both(mesh, [None, None], 0.5, norm_type)
    assert norm.item() == expected_norm.item() == 0.0
    assert found == [None, None]


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_norm_that_is_not_finite_scales_like_torch(mesh: Mesh, bad: float) -> None:
    (norm, found), (expected_norm, expected) = clip_both(mesh, [1.0, bad, 2.0], 0.5)
    torch.testing.assert_close(norm, expected_norm, equal_nan=True)
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_norm_that_is_not_finite_can_be_an_error(caller: Mesh, bad: float) -> None:
    rrefs = [make("a", 1), make("b", 2)]
    with dist_autograd.context() as context_id:
        losses = [
            zrpc.rpc_sync(rref.owner(), use, (rref, by))
            for rref, by in zip(rrefs, (bad, 4.0), strict=True)
        ]
        dist_autograd.backward(context_id, losses)
        with pytest.raises(RuntimeError, match=f"{bad}"):
            clip_grad_norm_(context_id, rrefs, 0.5, error_if_nonfinite=True)
        assert gradients(rrefs[1], context_id).tolist() == [4.0, 4.0, 4.0]


def test_sparse_gradients_are_clipped(caller: Mesh) -> None:
    weight = torch.ones(4, 3, dtype=torch.float64, requires_grad=True)
    PARAMETERS["table"] = weight

    table, dense = zrpc.rpc_sync("worker1", refer, ("table",)), make("w", 2)
    with dist_autograd.context() as context_id:
        rows = zrpc.rpc_sync("worker1", look_up_rows, (table,))
        dist_autograd.backward(context_id, [rows, zrpc.rpc_sync("worker2", use, (dense, 2.0))])
        norm = clip_grad_norm_(context_id, [table, dense], 0.5)
        found = gradients(table, context_id)
        assert found.is_sparse
        norm, sparse, dense = norm, found.to_dense(), gradients(dense, context_id)
    # torch refuses sparse gradients, so compare with a dense one.
    locals_ = [weight, torch.ones(3, dtype=torch.float64, requires_grad=True)]
    locals_[0].grad = torch.autograd.grad(sum_of_rows(weight, sparse=False), weight)[0]
    locals_[1].grad = torch.full_like(locals_[1], 2.0)
    expected = torch.nn.utils.clip_grad_norm_(locals_, 0.5)
    torch.testing.assert_close(norm, expected)
    torch.testing.assert_close([sparse, dense], [w.grad for w in locals_])


def look_up_rows(rref: Parameter) -> torch.Tensor:
    return sum_of_rows(rref.local_value(), sparse=True)


def sum_of_rows(weight: torch.Tensor, sparse: bool) -> torch.Tensor:
    indices = torch.tensor([1, 3, 1])
    return torch.nn.functional.embedding(indices, weight, sparse=sparse).sum()


def test_clipping_in_an_unknown_context_raises(caller: Mesh) -> None:
    rref = make("a", 1)
    with pytest.raises(RuntimeError, match="Could not find autograd context with id: 77"):
        clip_grad_norm_(77, [rref], 1.0)


# An owner whose gradient is on a pretended accelerator. Values are copied from there as threes.
PROGRAM = f"""
import os
import sys
import torch
sys.path.insert(0, {str(ROOT)!r})  # for this test's own modules
"""
PROGRAM += """
import zrpc
import zrpc.autograd as dist_autograd
from tests.support.identity import here
from tests.support.pretended import empty, implement
from zrpc.agent.current import current_agent
from zrpc.optim import clip_grad_norm_
from zrpc.services.autograd.service import AutogradService
from zrpc.testing import local_mesh

implement("linalg_vector_norm", lambda gradient, *_, **__: empty((), gradient.dtype))
implement("mul.Tensor", lambda gradient, factor: empty(tuple(gradient.shape), gradient.dtype))
implement("_copy_from", lambda _, to, non_blocking=False: to.fill_(3))
parameter = torch.nn.Parameter(torch.ones(3))


def refer(context_id):
    state = current_agent().service(AutogradService).contexts.find(context_id)
    state.set_gradient(parameter, empty((3,), torch.float32))
    return zrpc.RRef(parameter)


def run():
    with dist_autograd.context() as context_id:
        rref = zrpc.rpc_sync("worker1", here(refer), (context_id,))
        return clip_grad_norm_(context_id, [rref], 1.0)


with local_mesh(2, timeout=60) as mesh:
    print(mesh.run(0, run), flush=True)
os._exit(0)  # as in tests/services/autograd/test_accelerators.py
"""


@pytest.mark.system
@pytest.mark.skipif(
    not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch can't pretend an accelerator",
)
def test_gradients_on_an_accelerator_are_clipped(tmp_path: Path) -> None:
    script = tmp_path / "clip.py"
    script.write_text(PROGRAM)
    found = subprocess.run(
        [warm_commands().python, str(script)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert found.stdout == "tensor(3.)\n", found.stdout + found.stderr

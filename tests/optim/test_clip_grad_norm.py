"""clip_grad_norm_ bounds the norm of gradients over all workers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zrpc
import zrpc.autograd as dist_autograd
from tests.optim.twins import (
    PARAMETERS,
    Parameter,
    gradients,
    make,
    refer,
    use,
)
from zrpc.optim import clip_grad_norm_
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=3, timeout=60)

Clipped = tuple[torch.Tensor, list[Any]]


def clip_both(
    mesh: Mesh, factors: list[float | None], max_norm: float, norm_type: float
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


INF, NAN = float("inf"), float("nan")
CASES: list[tuple[list[float | None], float, float]] = [
    *(([1.0, -4.0, 0.25, 3.0], bound, kind) for bound in (0.5, 1e3) for kind in (2, 1, 3, INF, 0)),
    *(([1.0, bad, 2.0], 0.5, 2) for bad in (None, INF, NAN)),
    *(([None, None], 0.5, kind) for kind in (2, 0, INF, -INF)),
]


@pytest.mark.parametrize(("factors", "max_norm", "norm_type"), CASES)
def test_clipping_equals_that_of_torch(
    mesh: Mesh, factors: list[float | None], max_norm: float, norm_type: float
) -> None:
    found, expected = clip_both(mesh, factors, max_norm, norm_type)
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("bad", [INF, NAN])
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
    PARAMETERS["table"] = weight = torch.ones(4, 3, dtype=torch.float64, requires_grad=True)
    table, dense = zrpc.rpc_sync("worker1", refer, ("table",)), make("w", 2)
    with dist_autograd.context() as context_id:
        rows = zrpc.rpc_sync("worker1", look_up_rows, (table,))
        dist_autograd.backward(context_id, [rows, zrpc.rpc_sync("worker2", use, (dense, 2.0))])
        norm = clip_grad_norm_(context_id, [table, dense], 0.5)
        found = gradients(table, context_id)
        assert found.is_sparse
        clipped = [found.to_dense(), gradients(dense, context_id)]
    # torch refuses sparse gradients, so compare with a dense one.
    locals_ = [weight, torch.ones(3, dtype=torch.float64, requires_grad=True)]
    locals_[0].grad = torch.autograd.grad(sum_of_rows(weight, sparse=False), weight)[0]
    locals_[1].grad = torch.full_like(locals_[1], 2.0)
    expected = torch.nn.utils.clip_grad_norm_(locals_, 0.5)
    torch.testing.assert_close(norm, expected)
    torch.testing.assert_close(clipped, [w.grad for w in locals_])


def look_up_rows(rref: Parameter) -> torch.Tensor:
    return sum_of_rows(rref.local_value(), sparse=True)


def sum_of_rows(weight: torch.Tensor, sparse: bool) -> torch.Tensor:
    indices = torch.tensor([1, 3, 1])
    return torch.nn.functional.embedding(indices, weight, sparse=sparse).sum()

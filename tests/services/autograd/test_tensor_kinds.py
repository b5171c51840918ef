"""Gradients of tensors of any kind: views, dtypes, shapes, and sparse tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.services.autograd.split_models import (
    LEAVES,
    W,
    X,
    assert_as_local,
    call,
    layer,
    leaf,
    train,
)
from zrpc.agent.current import find_agent
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=3, timeout=60)

VIEWS = {
    "slice": lambda x: x[1:],
    "row": lambda x: x[1],
    "transposed": lambda x: x.t(),
    "strided": lambda x: x[::2, ::2],
    "expanded": lambda x: x[0].expand(4, 3),
    "diagonal": lambda x: x.diagonal(),
    "reshaped": lambda x: x.view(9),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_views_there_and_back(mesh: Mesh, view: Any) -> None:
    def model() -> Any:
        sent = view(torch.tanh(W[0]))
        back = call("worker1", lambda x: (x * 3).sin()[..., :2], sent)
        return (back**2).sum()

    assert_as_local(mesh, model, LEAVES)


def test_a_view_of_a_leaf(mesh: Mesh) -> None:
    assert_as_local(mesh, lambda: call("worker1", torch.sin, W[0][1]).sum(), LEAVES)


def test_a_tensor_and_views_of_it_in_one_message(mesh: Mesh) -> None:
    def use(base: Any, row: Any, column: Any) -> Any:
        return (base.sin().sum() * row * column).sum()

    def model() -> Any:
        base = torch.tanh(W[0])
        return call("worker1", use, base, base[0], base[:, 1])

    assert_as_local(mesh, model, LEAVES)


def test_a_tensor_twice_in_one_message(mesh: Mesh) -> None:
    def model() -> Any:
        x = X * 2
        return call("worker1", lambda a, b, c: (a * b * c[0]).sum(), x, x, [x])

    assert_as_local(mesh, model, LEAVES)


def test_results_that_share_storage(mesh: Mesh) -> None:
    def parts(x: Any) -> Any:
        whole = layer(1, x)
        return whole, whole[:2], whole.view(3, 1)

    def model() -> Any:
        whole, head, column = call("worker1", parts, X)
        return (whole.sin() * column).sum() + head.prod()

    assert_as_local(mesh, model, LEAVES)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float32, {"rtol": 1e-5, "atol": 1e-6}),
        (torch.float64, {}),
        (torch.bfloat16, {"rtol": 0.02, "atol": 0.02}),
        (torch.float16, {"rtol": 1e-2, "atol": 1e-2}),
        (torch.complex64, {"rtol": 1e-5, "atol": 1e-5}),
        (torch.complex128, {}),
    ],
    ids=str,
)
def test_dtypes(mesh: Mesh, dtype: Any, tolerance: Any) -> None:
    x, w = leaf(3, seed=2, dtype=dtype), leaf(3, 3, seed=3, dtype=dtype)

    def model() -> Any:
        far = call("worker1", lambda x: (x @ w) * x, x * 2)
        assert far.dtype == dtype
        return far.abs().sum() if dtype.is_complex else far.sum()

    assert_as_local(mesh, model, [x, w], **tolerance)


def test_mixed_dtypes_in_one_message(mesh: Mesh) -> None:
    a, b = leaf(3, seed=2, dtype=torch.float32), leaf(3, seed=3, dtype=torch.complex128)

    def use(x: Any, half: Any, z: Any, index: Any) -> Any:
        return (x.double()[index] * half.double() * z.real + z.imag).sum()

    def model() -> Any:
        return call("worker1", use, a, a.bfloat16(), b * 1j, torch.tensor([2, 0, 1]))

    assert_as_local(mesh, model, [a, b], rtol=1e-2, atol=1e-2)


def test_conjugates_and_negatives(mesh: Mesh) -> None:
    z = leaf(3, seed=4, dtype=torch.complex128)

    def use(conjugate: Any, negative: Any) -> Any:
        assert conjugate.is_conj() or find_agent() is None
        return (conjugate * 1j).real.sum() + (negative**2).sum()

    def model() -> Any:
        return call("worker1", use, z.conj(), z.conj().imag)

    assert_as_local(mesh, model, [z])


def test_shapes_without_elements_and_scalars(mesh: Mesh) -> None:
    scalar, empty = leaf(seed=5), leaf(0, 3, seed=6)

    def model() -> Any:
        a, b = call("worker1", lambda s, e: (s * s, e * s), scalar, empty)
        return a + b.sum()

    assert_as_local(mesh, model, [scalar, empty])


def test_large_tensors(mesh: Mesh) -> None:
    """They travel as frames of their own."""
    big = leaf(200, 300, seed=7)

    def model() -> Any:
        return (call("worker1", lambda x: x.sin() * 2, big * 2) ** 2).sum()

    assert_as_local(mesh, model, [big])


def test_an_embedding_with_sparse_gradients(mesh: Mesh) -> None:
    embedding = torch.nn.Embedding(10, 3, sparse=True, dtype=torch.float64)

    def model() -> Any:
        rows = call("worker1", embedding.forward_rows, torch.tensor([1, 3, 1]))
        return (rows * X).sum() + call("worker1", embedding.forward_rows, torch.tensor([7])).sum()

    embedding.forward_rows = lambda rows: torch.nn.functional.embedding(
        rows, embedding.weight, sparse=True
    )
    assert_as_local(mesh, model, [X, embedding.weight])
    assert train(mesh, model)[embedding.weight].is_sparse


def test_a_sparse_gradient_that_travels(mesh: Mesh) -> None:
    """The worker that looks the rows up is not the one that has the weight."""

    def look_up(weight: Any) -> Any:
        return torch.nn.functional.embedding(torch.tensor([1, 2, 1]), weight, sparse=True)

    def model() -> Any:
        return (call("worker1", look_up, W[0]) * X).sum()

    assert_as_local(mesh, model, LEAVES)


def test_a_sparse_activation(mesh: Mesh) -> None:
    """A sparse tensor that requires grad is part of the graph too."""

    def model() -> Any:
        sparse = (W[0] * torch.eye(3, dtype=torch.float64)).to_sparse()
        return (call("worker1", torch.sparse.mm, sparse, W[1]) ** 2).sum()

    assert_as_local(mesh, model, LEAVES)

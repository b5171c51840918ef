"""Tensors of every dtype, shape and kind: what arrives."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable

import pytest
import torch

import zrpc as rpc
import zrpc.autograd as dist_autograd
from tests.support.travel import LARGE, SMALL, assert_same, back, bits
from zrpc.testing import Mesh


def _can_be_made(dtype: torch.dtype) -> bool:
    try:
        torch.empty(4, dtype=dtype)
    except (RuntimeError, TypeError):
        return False
    return True


_ALL = {v for v in vars(torch).values() if isinstance(v, torch.dtype)}
_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
DTYPES = sorted((d for d in _ALL - _QUANTIZED if _can_be_made(d)), key=str)


def of_dtype(dtype: torch.dtype, count: int) -> torch.Tensor:
    tensor = torch.empty(count, dtype=dtype)
    raw = bytes(i % 2 for i in range(count * tensor.element_size()))  # valid for bool as well
    ctypes.memmove(tensor.data_ptr(), raw, len(raw))
    return tensor


# -- dtypes ----------------------------------------------------------------------------------


@pytest.mark.system
def test_dtypes(shared: Mesh) -> None:
    assert {torch.float32, torch.bfloat16, torch.complex32, torch.bool, torch.uint16} <= set(DTYPES)
    assert len(DTYPES) > 20
    for dtype in DTYPES:
        for count in (SMALL, LARGE):
            sent = of_dtype(dtype, count)
            received = back(sent)
            assert (received.dtype, received.shape) == (dtype, sent.shape)
            assert bits(received) == bits(sent)


@pytest.mark.filterwarnings("ignore")
def test_quantized(shared: Mesh) -> None:
    for dtype in (torch.qint8, torch.quint8, torch.qint32):
        for size in (SMALL, LARGE):
            sent = torch.quantize_per_tensor(torch.randn(size), 0.1, 3, dtype)
            received = back(sent)
            assert received.is_quantized
            assert received.q_scale() == sent.q_scale()
            assert received.q_zero_point() == sent.q_zero_point()
            assert torch.equal(received.int_repr(), sent.int_repr())


# -- shapes and strides ------------------------------------------------------------------------


VIEWS: list[Callable[[int], torch.Tensor]] = [
    lambda n: torch.randn(n, n),
    lambda n: torch.randn(n, n).t(),
    lambda n: torch.randn(n, n)[:, 0],
    lambda n: torch.randn(n, n)[::2, ::2],
    lambda n: torch.randn(n, 1).expand(n, n),
    lambda n: torch.randn(2 * n).unfold(0, n, 1),
    lambda n: torch.randn(2 * n).as_strided((n, 3), (1, 1), 2),
    lambda n: torch.randn(2, 3, n, n).to(memory_format=torch.channels_last),
    lambda n: torch.randn(n, n, dtype=torch.complex64).conj(),
    lambda n: torch.randn(n, n, dtype=torch.complex128).conj().imag,
    lambda n: torch.randn(n, n, dtype=torch.complex64).imag[1:],
    lambda n: torch._neg_view(torch.randn(n, n)),
    lambda n: torch.randn(n, n).view(torch.int32),
    lambda n: torch.randn(n, n)[:, None, :, None],
    lambda n: torch.empty(n, 0, 3),
]


def test_views(shared: Mesh) -> None:
    for make in VIEWS:
        for n in (4, 300):
            sent = make(n)
            received = back(sent)
            assert_same(received, sent)
            assert received.is_conj() == sent.is_conj()
            assert received.is_neg() == sent.is_neg()


def test_strides_survive(shared: Mesh) -> None:
    for sent in (
        torch.randn(3, 5).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(2, 3, 4).permute(2, 0, 1),
        torch.randn(5, 1).expand(5, 7),
        torch.randn(3).expand(4, 3),
    ):
        assert back(sent).stride() == sent.stride()


# -- gradients -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [SMALL, LARGE])
class TestGradients:
    def test_a_view_of_a_leaf(self, shared: Mesh, size: int) -> None:
        sent = torch.zeros(2, size, requires_grad=True)
        one, two = back([sent[0], sent[1]])
        assert one.requires_grad
        assert two.requires_grad
        (one.sum() + two.sum()).backward()
        assert one.grad.sum() == size

    def test_a_result_of_inputs_with_gradients(self, shared: Mesh, size: int) -> None:
        received = rpc.rpc_sync(1, torch.mul, (torch.ones(size, requires_grad=True), 2))
        assert received.requires_grad
        assert received.is_leaf
        assert received.sum() == 2 * size

    @pytest.mark.parametrize("requires_grad", [True, False])
    def test_attributes_of_a_parameter(self, shared: Mesh, size: int, requires_grad: bool) -> None:
        sent = torch.nn.Parameter(torch.ones(size), requires_grad=requires_grad)
        sent.tag, sent.twin, sent.scale = "x", sent, torch.ones(2)  # type: ignore[attr-defined]
        received, again = back([sent, sent])
        assert type(received) is torch.nn.Parameter
        assert received is again
        assert received.twin is received
        assert received.tag == "x"
        assert torch.equal(received.scale, torch.ones(2))
        assert torch.equal(received, sent)
        assert received.requires_grad is requires_grad

    def test_attributes_of_a_tensor(self, shared: Mesh, size: int) -> None:
        sent = torch.ones(size)
        sent.tag, sent.twin = "x", sent  # type: ignore[attr-defined]
        received, again, view = back([sent, sent, sent[:1]])
        assert received.twin is received is again
        assert received.tag == "x"
        assert vars(view) == {}
        assert torch.equal(received, sent)

    def test_an_attribute_that_can_not_be_pickled_is_left_out(
        self, shared: Mesh, size: int
    ) -> None:
        sent = torch.nn.Parameter(torch.ones(size))
        sent.lock, sent.tag = threading.Lock(), "x"  # type: ignore[attr-defined]
        sent.owner = torch.nn.ParameterList([sent])  # type: ignore[attr-defined]
        with pytest.warns(UserWarning, match="attribute 'lock' of a tensor is not sent") as warned:
            received = rpc.rpc_sync(1, attributes_of, (sent, 1))
        assert received == ["owner", "tag"]
        assert len(warned) == 1


def attributes_of(tensor: torch.Tensor, _: object = None) -> list[str]:
    return sorted(vars(tensor))


def tagged(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    tensor = make()
    tensor.tag = "x"  # type: ignore[attr-defined]
    return tensor


KINDS: list[Callable[[], torch.Tensor]] = [
    lambda: torch.ones(2),
    lambda: torch.ones(0),
    lambda: torch.tensor(1.0),
    lambda: torch.ones(2, requires_grad=True),
    lambda: torch.nn.Parameter(torch.ones(2)),
    lambda: torch.ones(2, 3).t(),
    lambda: torch.ones(2, device="meta"),
    lambda: torch.eye(2).to_sparse(),
    lambda: torch.nn.Parameter(torch.eye(2).to_sparse()),
    lambda: torch.eye(2).to_sparse_csr(),
    lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    lambda: torch.nested.nested_tensor([torch.ones(2)]),
]


@pytest.mark.parametrize("in_context", [False, True])
def test_attributes_of_tensors_of_all_kinds(shared: Mesh, in_context: bool) -> None:
    for make in KINDS:
        with dist_autograd.context() if in_context else contextlib.nullcontext():
            assert rpc.rpc_sync(1, attributes_of, (tagged(make),)) == ["tag"]
            assert vars(rpc.rpc_sync(1, tagged, (make,))) == {"tag": "x"}
            assert vars(rpc.remote(1, tagged, (make,)).to_here()) == {"tag": "x"}


# -- sparse ----------------------------------------------------------------------------------


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_sparse_parameter(shared: Mesh, requires_grad: bool) -> None:
    sent = torch.nn.Parameter(torch.eye(4).to_sparse(), requires_grad=requires_grad)
    sent.tag = "x"  # type: ignore[attr-defined]
    received = back(sent)
    assert type(received) is torch.nn.Parameter
    assert received.layout is torch.sparse_coo
    assert received.requires_grad is requires_grad
    assert received.tag == "x"  # type: ignore[attr-defined]
    assert torch.equal(received.to_dense(), torch.eye(4))


_DENSE = torch.arange(36.0).reshape(6, 6) * (torch.arange(36).reshape(6, 6) % 5 == 0)


SPARSE: list[Callable[[], torch.Tensor]] = [
    lambda: _DENSE.to_sparse(),
    lambda: _DENSE.to_sparse(1),
    lambda: torch.sparse_coo_tensor([[0, 0, 1]], [1.0, 2.0, 3.0], (5,)),
    lambda: torch.sparse_coo_tensor(torch.empty(2, 0).long(), [], (3, 4)),
    lambda: _DENSE.to_sparse_csr(),
    lambda: _DENSE.to_sparse_bsr((2, 3)),
    lambda: torch.stack([_DENSE, _DENSE]).to_sparse_csr(),
]


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("requires_grad", [False, True])
def test_sparse(shared: Mesh, requires_grad: bool) -> None:
    for make in SPARSE:
        sent = make()
        sent.requires_grad_(requires_grad)
        received = back(sent)
        assert received.layout == sent.layout
        assert (received.dtype, received.shape) == (sent.dtype, sent.shape)
        assert received.requires_grad is requires_grad
        if sent.layout is torch.sparse_coo:
            assert received.is_coalesced() == sent.is_coalesced()
            assert received.sparse_dim() == sent.sparse_dim()
            assert len(received.detach().coalesce().values()) == len(
                sent.detach().coalesce().values()
            )
        torch.testing.assert_close(received.detach().to_dense(), sent.detach().to_dense())


# -- other kinds -----------------------------------------------------------------------------


class Tagged(torch.Tensor):
    """A subclass, with an attribute."""


def test_tensor_subclass(shared: Mesh) -> None:
    sent = torch.ones(3).as_subclass(Tagged)
    sent.tag = "mine"  # type: ignore[attr-defined]
    received = back(sent)
    assert type(received) is Tagged
    assert received.tag == "mine"
    assert received.sum() == 3


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_nested_tensor(shared: Mesh) -> None:
    sent = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    received = back(sent)
    assert received.is_nested
    assert [t.tolist() for t in received.unbind()] == [t.tolist() for t in sent.unbind()]

"""Tensors and arrays: what arrives, how many bytes travel, and who shares memory with whom."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import zrpc as rpc
import zrpc.autograd as dist_autograd
from tests.support.targets import echo
from tests.support.travel import LARGE, OVERHEAD_BYTES, SMALL, assert_same, back, bits, travel
from zrpc.testing import Mesh

SIZES = pytest.mark.parametrize("size", [SMALL, LARGE])


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


@pytest.mark.system
def test_dtypes(shared: Mesh) -> None:
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
            assert received.dtype == dtype
            assert (received.q_scale(), received.q_zero_point()) == (0.1, 3)
            assert torch.equal(received.int_repr(), sent.int_repr())


@pytest.mark.filterwarnings("ignore")
def test_a_quantized_embedding(shared: Mesh) -> None:
    """Its weight has a scheme that torch can't copy."""
    embedding, at = torch.ao.nn.quantized.Embedding(10, 12), torch.tensor([1, 9])
    assert torch.equal(back(embedding)(at), embedding(at))


# Those that keep their strides, and others; `tests/wire` draws many more.
DENSE: list[Callable[[int], torch.Tensor]] = [
    lambda n: torch.randn(n, n).t(),
    lambda n: torch.randn(n, n, 2).permute(2, 0, 1),
    lambda n: torch.randn(n, 1).expand(n, n),
    lambda n: torch.randn(2, 3, n, n).to(memory_format=torch.channels_last),
]
VIEWS: list[Callable[[int], torch.Tensor]] = [
    *DENSE,
    lambda n: torch.randn(n, n)[::2, ::2],
    lambda n: torch.randn(2 * n).as_strided((n, 3), (1, 1), 2),
    lambda n: torch.randn(n, n, dtype=torch.complex64).conj(),
    lambda n: torch.randn(n, n, dtype=torch.complex128).conj().imag,
    lambda n: torch.randn(n, n, dtype=torch.complex64).imag[1:],
    lambda n: torch.randn(n, n).view(torch.int32),
    lambda n: torch.empty(n, 0, 3),
]


def test_views(shared: Mesh) -> None:
    for make in VIEWS:
        for n in (4, 300):
            sent = make(n)
            received = back(sent)
            assert_same(received, sent)
            assert (received.is_conj(), received.is_neg()) == (sent.is_conj(), sent.is_neg())
            assert make not in DENSE or received.stride() == sent.stride()


# -- gradients and attributes --------------------------------------------------------------------


KINDS: list[Callable[[], torch.Tensor]] = [
    lambda: torch.ones(LARGE),
    lambda: torch.ones(0),
    lambda: torch.tensor(1.0),
    lambda: torch.ones(2, requires_grad=True),
    lambda: torch.nn.Parameter(torch.ones(2)),
    lambda: torch.nn.Parameter(torch.ones(LARGE), requires_grad=False),
    lambda: torch.ones(2, 3).t(),
    lambda: torch.ones(2, device="meta"),
    lambda: torch.eye(2).to_sparse(),
    lambda: torch.nn.Parameter(torch.eye(2).to_sparse()),
    lambda: torch.nn.Parameter(torch.eye(2).to_sparse(), requires_grad=False),
    lambda: torch.eye(2).to_sparse_csr(),
    lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
]


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


class Subclass(torch.Tensor):
    pass


def subclass() -> torch.Tensor:
    return torch.ones(3).as_subclass(Subclass)


def tagged(make: Callable[[], torch.Tensor]) -> Any:
    tensor: Any = make()
    tensor.tag = "x"
    return tensor


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.parametrize("in_context", [False, True])
def test_attributes_of_tensors_of_all_kinds(shared: Mesh, in_context: bool) -> None:
    for make in [*KINDS, nested, subclass]:
        with dist_autograd.context() if in_context else contextlib.nullcontext():
            assert rpc.rpc_sync(1, attributes_of, (tagged(make),)) == ["tag"]
            assert vars(rpc.rpc_sync(1, tagged, (make,))) == {"tag": "x"}
            assert vars(rpc.remote(1, tagged, (make,)).to_here()) == {"tag": "x"}


def attributes_of(tensor: torch.Tensor, _: object = None) -> list[str]:
    return sorted(vars(tensor))


def test_tensors_of_all_kinds_arrive_once_and_equal_with_what_they_refer_to(shared: Mesh) -> None:
    for make in KINDS:
        sent = tagged(make)
        sent.twin, sent.scale = sent, torch.ones(2)
        received, again = back([sent, sent])
        assert received is again is received.twin
        assert (type(received), received.layout) == (type(sent), sent.layout)
        assert received.requires_grad is sent.requires_grad
        assert torch.equal(received.scale, torch.ones(2))
        if not (sent.is_meta or sent.is_quantized):
            assert torch.equal(*(each.detach().to_dense() for each in (received, sent)))
    assert vars(back([tagged(KINDS[0])[:1]])[0]) == {}  # a view
    assert type(back(subclass())) is Subclass
    assert [t.tolist() for t in back(nested()).unbind()] == [[1, 1], [1, 1, 1]]


@SIZES
def test_an_attribute_that_can_not_be_pickled_is_left_out(shared: Mesh, size: int) -> None:
    sent: Any = torch.nn.Parameter(torch.ones(size))
    sent.lock, sent.tag = threading.Lock(), "x"
    sent.owner = torch.nn.ParameterList([sent])
    with pytest.warns(UserWarning, match="attribute 'lock' of a tensor is not sent") as warned:
        received = rpc.rpc_sync(1, attributes_of, (sent, 1))
    assert received == ["owner", "tag"]
    assert len(warned) == 1


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
        assert_same(received, sent)
        if sent.layout is torch.sparse_coo:
            assert received.is_coalesced() == sent.is_coalesced()
            assert received.sparse_dim() == sent.sparse_dim()
            values = [each.detach().coalesce().values() for each in (received, sent)]
            assert len(values[0]) == len(values[1])


# -- containers and arrays -----------------------------------------------------------------------


class Point(NamedTuple):
    x: torch.Tensor
    label: str = "p"


@dataclass(frozen=True, slots=True)
class Sample:
    x: torch.Tensor
    more: dict[str, list[torch.Tensor]]


@SIZES
def test_containers(shared: Mesh, size: int) -> None:
    ones = torch.ones(size)
    point, sample = back([Point(ones), Sample(ones, {"a": [ones] * 2})])
    assert (type(point), point.label, type(sample)) == (Point, "p", Sample)
    assert point.x is sample.x is sample.more["a"][1]
    assert point.x.sum() == size
    received = rpc.rpc_sync(1, torch.max, (torch.ones(2, size), 0))
    assert received.values.sum() == size
    assert type(received) is torch.return_types.max
    received = back({i: torch.full((size // 10,), float(i)) for i in range(300)})
    assert [received[i][0].item() for i in range(300)] == list(range(300))


ARRAYS: list[Any] = [
    np.arange(SMALL),
    np.arange(LARGE).reshape(100, -1).T,
    np.arange(LARGE)[::3],
    np.float32(1.5),
    np.array(5),
    np.empty((0, 3)),
    np.array(["a", "bc"] * LARGE),
    np.array([1, "a", None], dtype=object),
    np.array([(1, 2.0)] * LARGE, dtype=[("a", "i4"), ("b", "f8")]),
    np.array(["2020-01-01"], dtype="datetime64[D]"),
    np.arange(LARGE).astype(">i4"),
    np.ma.masked_array([1, 2], [True, False]),
    *(np.frombuffer(bytes(8 * size)) for size in (SMALL, LARGE)),  # can't be written to
]


def test_arrays(shared: Mesh) -> None:
    for sent in ARRAYS:
        received = back(sent)
        assert type(received) is type(sent)
        assert (received.dtype, received.shape) == (sent.dtype, sent.shape)
        assert received.flags.writeable == sent.flags.writeable
        np.testing.assert_array_equal(received, sent)


# -- how many bytes travel -----------------------------------------------------------------------


def big() -> torch.Tensor:
    return torch.zeros(1000, 1000)


SENT: list[tuple[Callable[[], Any], int]] = [
    (lambda: big()[0], 1000),
    (lambda: big()[::10, ::10], 10_000),
    (lambda: big()[0:0], 0),
    (lambda: torch.zeros(1).expand(1000, 1000), 1),
    (lambda: torch.zeros(2000).unfold(0, 1000, 1), 2000),
    (lambda: torch.nn.Parameter(big()[0]), 1000),
    (lambda: torch.zeros(1000, 1000, dtype=torch.complex64).real[0], 1000),
    (lambda: torch.eye(1000).to_sparse_csr(), 1000 * 5),
    (lambda: [(tensor := big())[0], tensor[-1]], 2000),  # not what lies between
    (lambda: [big()] * 10, 1_000_000),
    (lambda: [tensor := big(), tensor.t(), tensor[5], tensor.view(-1)], 1_000_000),
    (lambda: np.zeros((1000, 1000))[0], 2000),
]


def test_only_the_elements_of_a_view_travel_and_a_shared_storage_once(shared: Mesh) -> None:
    for make, elements in SENT:
        assert travel(make()) <= 4 * elements + OVERHEAD_BYTES
    for size in (SMALL, LARGE):
        assert back(torch.zeros(3, size)[1]).untyped_storage().nbytes() <= size * 4 + 16


@SIZES
def test_tensors_that_share_memory_share_it_on_arrival(shared: Mesh, size: int) -> None:
    tensor = torch.zeros(2, size, requires_grad=True)
    one, two = back([tensor[0], tensor[1]])  # and so are their gradients required
    (one.sum() + two.sum()).backward()
    assert one.grad.sum() == size
    assert rpc.rpc_sync(1, torch.mul, (tensor, 2)).is_leaf
    tensor = torch.zeros(2, size)
    whole, row, turned, flat = back([tensor, tensor[1], tensor.t(), tensor.view(-1)])
    row.fill_(1)
    assert whole.sum() == turned.sum() == flat.sum() == size
    whole.fill_(2)
    assert row.sum() == 2 * size
    tensor = torch.zeros(size, dtype=torch.complex64)
    whole, real, integers, storage = back(
        [tensor, tensor.real, tensor.view(torch.int32), tensor.untyped_storage()]
    )
    real.fill_(1)
    assert whole.sum() == size
    assert integers.count_nonzero() == size
    assert storage.nbytes() == 8 * size
    assert storage[2] == 128  # of the float 1.0
    tensor = torch.zeros(size)
    assert rpc.rpc_sync(1, shares, (tensor, [tensor[1:]]), {"z": {"a": tensor}})


def shares(x: torch.Tensor, y: list[torch.Tensor], z: dict[str, torch.Tensor]) -> bool:
    x.fill_(1)
    return bool(y[0].all() and z["a"].all())


def fill(tensor: Any) -> Any:
    tensor[...] = 7
    return tensor


_kept = [make(size) for make in (torch.zeros, np.zeros) for size in (SMALL, LARGE)]


def kept(number: int) -> Any:
    return _kept[number]


@pytest.mark.parametrize("number", range(4))
@pytest.mark.filterwarnings("error")
def test_what_either_side_writes_the_other_does_not_see(shared: Mesh, number: int) -> None:
    for to in (0, 1):
        mine: Any = kept(number) + 0
        assert (rpc.rpc_sync(to, fill, (mine,)) == 7).all()
        assert (mine == 0).all()
        received = rpc.rpc_sync(to, kept, (number,))
        received[...] = 5
        assert (received == 5).all()
        assert (kept(number) == 0).all()
        futures = []
        for i in range(20):
            mine[...] = i
            futures.append(rpc.rpc_async(to, echo, (mine,)))
        mine[...] = -1  # after the calls
        for i, future in enumerate(futures):
            assert (future.wait() == i).all()

"""Tensors and arrays: what arrives, how many bytes travel, and who shares memory with whom."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import zrpc as rpc
from tests.support.targets import echo
from tests.support.ways import by_async, by_remote, by_wait_all
from zrpc.testing import Mesh
from zrpc.wire.message import Message
from zrpc.wire.pickling import Encoder

# Sizes on both sides of the limit between the pickle and a frame of its own.
SMALL, LARGE = 10, 100_000
# For what a message has beside the elements: header, names, shapes.
OVERHEAD_BYTES = 2_000


def travel(obj: Any) -> int:
    """How many bytes travel for an object."""
    message = Message(1)
    Encoder(None, 0, True).pack(obj, message)
    buffers = sum(memoryview(buffer).nbytes for buffer in message.buffers)
    return len(message.first_frame()) + buffers


def back(value: Any, to: int = 1) -> Any:
    return rpc.rpc_sync(to, echo, (value,))


def bits(tensor: torch.Tensor) -> list[int]:
    """The elements as bytes, whatever the dtype."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return list(ctypes.string_at(plain.data_ptr(), plain.numel() * plain.element_size()))


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


def assert_same(received: torch.Tensor, sent: torch.Tensor) -> None:
    assert type(received) is type(sent)
    assert received.dtype == sent.dtype
    assert received.shape == sent.shape
    assert received.layout == sent.layout
    assert received.requires_grad == sent.requires_grad
    torch.testing.assert_close(received, sent, rtol=0, atol=0, equal_nan=True)


# -- dtypes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(shared: Mesh, dtype: torch.dtype) -> None:
    for count in (SMALL, LARGE):
        sent = of_dtype(dtype, count)
        received = back(sent)
        assert (received.dtype, received.shape) == (dtype, sent.shape)
        assert bits(received) == bits(sent)


def test_there_are_dtypes() -> None:
    assert {torch.float32, torch.bfloat16, torch.complex32, torch.bool, torch.uint16} <= set(DTYPES)
    assert len(DTYPES) > 20


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32], ids=str)
@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.filterwarnings("ignore")
def test_quantized(shared: Mesh, dtype: torch.dtype, size: int) -> None:
    sent = torch.quantize_per_tensor(torch.randn(size), 0.1, 3, dtype)
    received = back(sent)
    assert received.is_quantized
    assert (received.q_scale(), received.q_zero_point()) == (sent.q_scale(), sent.q_zero_point())
    assert torch.equal(received.int_repr(), sent.int_repr())


@pytest.mark.filterwarnings("ignore")
def test_quantized_per_channel(shared: Mesh) -> None:
    scales, zeros = torch.tensor([0.1, 0.2]), torch.tensor([0, 1])
    sent = torch.quantize_per_channel(torch.randn(2, 3), scales, zeros, 0, torch.qint8)
    received = back(sent)
    assert torch.equal(received.int_repr(), sent.int_repr())
    torch.testing.assert_close(received.q_per_channel_scales(), sent.q_per_channel_scales())


def test_special_values(shared: Mesh) -> None:
    sent = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45])
    assert bits(back(sent)) == bits(sent)


# -- shapes and strides ------------------------------------------------------------------------


@pytest.mark.parametrize("n", [4, 300])
@pytest.mark.parametrize(
    "make",
    [
        lambda n: torch.randn(n, n),
        lambda n: torch.randn(n, n).t(),
        lambda n: torch.randn(2, n, n).permute(2, 0, 1),
        lambda n: torch.randn(n, n)[:, 0],
        lambda n: torch.randn(n, n)[::2, ::2],
        lambda n: torch.randn(n, n)[1:3, 1:3],
        lambda n: torch.randn(n * n)[-5:],
        lambda n: torch.randn(n, 1).expand(n, n),
        lambda n: torch.randn(1).expand(n, n),
        lambda n: torch.randn(()).expand(n),
        lambda n: torch.randn(2 * n).unfold(0, n, 1),
        lambda n: torch.randn(2 * n).as_strided((n, 3), (1, 1), 2),
        lambda n: torch.randn(n, n).as_strided((n, 2), (n, 0)),
        lambda n: torch.randn(2, 3, n, n).to(memory_format=torch.channels_last),
        lambda n: torch.randn(n, n).diagonal(),
        lambda n: torch.randn(n, n, dtype=torch.complex64).conj(),
        lambda n: torch.randn(n, n, dtype=torch.complex64).conj().t()[1:],
        lambda n: torch.randn(n, n, dtype=torch.complex128).conj().imag,
        lambda n: torch.randn(n, n, dtype=torch.complex64).real,
        lambda n: torch.randn(n, n, dtype=torch.complex64).imag[1:],
        lambda n: torch._neg_view(torch.randn(n, n)),
        lambda n: torch.randn(n, n).view(torch.int32),
        lambda n: torch.zeros(n, n, dtype=torch.uint8).view(-1)[3:7],
        lambda n: torch.randn(n, n)[:, None, :, None],
        lambda n: torch.tensor(n),
        lambda n: torch.empty(0),
        lambda n: torch.empty(n, 0, 3),
        lambda n: torch.randn(n, n)[0:0],
        lambda n: torch.randn(n)[n - 1],
    ],
    ids=[
        "dense transposed permuted column steps window tail expand1 expand2 expand3 unfold "
        "overlap1 overlap2 channels_last diagonal conj conj_t conj_imag real imag neg view_dtype "
        "odd_offset unsqueezed scalar empty empty_dims empty_slice element"
    ][0].split(),
)
def test_views(shared: Mesh, make: Callable[[int], torch.Tensor], n: int) -> None:
    sent = make(n)
    received = back(sent)
    assert_same(received, sent)
    assert received.is_conj() == sent.is_conj()
    assert received.is_neg() == sent.is_neg()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(3, 5).t(),
        lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.randn(2, 3, 4).permute(2, 0, 1),
        lambda: torch.randn(5, 1).expand(5, 7),
        lambda: torch.randn(3).expand(4, 3),
    ],
)
def test_strides_survive(shared: Mesh, make: Callable[[], torch.Tensor]) -> None:
    sent = make()
    assert back(sent).stride() == sent.stride()


# -- what travels ----------------------------------------------------------------------------


def big() -> torch.Tensor:
    return torch.zeros(1000, 1000)


@pytest.mark.parametrize(
    ("make", "elements"),
    [
        (lambda: big()[0], 1000),
        (lambda: big()[:, 0], 1000),
        (lambda: big()[0, 0], 1),
        (lambda: big()[::10, ::10], 10_000),
        (lambda: big()[500:502, 3:5], 4),
        (lambda: big().t()[0], 1000),
        (lambda: big().diagonal(), 1000),
        (lambda: big()[0:0], 0),
        (lambda: torch.zeros(1).expand(1000, 1000), 1),
        (lambda: big()[0].expand(1000, 1000), 1000),
        (lambda: torch.zeros(2000).unfold(0, 1000, 1), 2000),
        (lambda: torch.nn.Parameter(big()[0]), 1000),
        (lambda: big().requires_grad_()[5], 1000),
        (lambda: {"a": [big()[0]]}, 1000),
        (lambda: torch.zeros(1000, 1000, dtype=torch.complex64).real[0], 1000),
        (lambda: torch.eye(1000).to_sparse(), 1000 * 5),
        (lambda: torch.eye(1000).to_sparse_csr(), 1000 * 5),
        (lambda: [big()[0], big()[0]], 2000),
    ],
)
def test_only_the_elements_of_a_view_travel(make: Callable[[], Any], elements: int) -> None:
    assert travel(make()) <= 4 * elements + OVERHEAD_BYTES


def test_a_shared_storage_travels_once() -> None:
    tensor = big()
    assert travel([tensor] * 10) <= tensor.nbytes + OVERHEAD_BYTES
    assert (
        travel([tensor, tensor.t(), tensor[5], tensor.view(-1)]) <= tensor.nbytes + OVERHEAD_BYTES
    )


def test_small_views_far_apart_do_not_bring_what_lies_between() -> None:
    tensor = big()
    assert travel([tensor[0], tensor[-1]]) <= 2 * 4000 + OVERHEAD_BYTES


def test_the_same_array_travels_once() -> None:
    array = np.zeros(LARGE)
    assert travel([array] * 10) <= array.nbytes + OVERHEAD_BYTES


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_view_arrives_with_a_storage_of_its_elements(shared: Mesh, size: int) -> None:
    received = back(torch.zeros(3, size)[1])
    assert received.untyped_storage().nbytes() <= size * 4 + 16


# -- sharing in one message ----------------------------------------------------------------


@pytest.mark.parametrize("size", [SMALL, LARGE])
class TestShared:
    def test_the_same_tensor_twice(self, shared: Mesh, size: int) -> None:
        tensor = torch.zeros(size)
        one, two = back([tensor, tensor])
        assert one is two

    def test_a_tensor_and_its_views(self, shared: Mesh, size: int) -> None:
        tensor = torch.zeros(2, size)
        whole, row, turned, flat = back([tensor, tensor[1], tensor.t(), tensor.view(-1)])
        row.fill_(1)
        assert whole.sum() == turned.sum() == flat.sum() == size
        whole.fill_(2)
        assert row.sum() == 2 * size
        assert tensor.sum() == 0

    def test_views_that_overlap(self, shared: Mesh, size: int) -> None:
        tensor = torch.zeros(3 * size)
        head, tail = back((tensor[: 2 * size], tensor[size:]))
        head.fill_(1)
        assert tail.sum() == size

    def test_views_of_other_dtypes(self, shared: Mesh, size: int) -> None:
        tensor = torch.zeros(size, dtype=torch.complex64)
        whole, real, integers = back([tensor, tensor.real, tensor.view(torch.int32)])
        real.fill_(1)
        assert whole.sum() == size
        assert integers.count_nonzero() == size

    def test_a_parameter_and_its_data(self, shared: Mesh, size: int) -> None:
        parameter = torch.nn.Parameter(torch.zeros(size))
        received, data = back([parameter, parameter.data])
        assert isinstance(received, torch.nn.Parameter)
        data.fill_(1)
        assert received.sum() == size

    def test_across_args_and_kwargs(self, shared: Mesh, size: int) -> None:
        tensor = torch.zeros(size)
        assert rpc.rpc_sync(1, shares, (tensor, [tensor[1:]]), {"z": {"a": tensor}})

    def test_tied_weights_of_a_module(self, shared: Mesh, size: int) -> None:
        module = torch.nn.Sequential(torch.nn.Linear(size, 1), torch.nn.Linear(size, 1))
        module[1].weight = module[0].weight
        received = back(module)
        assert received[0].weight is received[1].weight

    def test_storages(self, shared: Mesh, size: int) -> None:
        tensor = torch.zeros(size)
        received, storage = back([tensor, tensor.untyped_storage()])
        assert storage.nbytes() == 4 * size
        received.fill_(1)
        assert storage[2] == 128  # of the float 1.0

    def test_not_across_messages(self, shared: Mesh, size: int) -> None:
        tensor = torch.zeros(size)
        one, two = back(tensor), back(tensor)
        one.fill_(1)
        assert two.sum() == tensor.sum() == 0


def shares(x: torch.Tensor, y: list[torch.Tensor], z: dict[str, torch.Tensor]) -> bool:
    x.fill_(1)
    return bool(y[0].all() and z["a"].all())


# -- private and writable --------------------------------------------------------------------


def fill(tensor: Any) -> Any:
    tensor[...] = 7
    return tensor


_kept = {size: torch.zeros(size) for size in (SMALL, LARGE)}
_kept_arrays = {size: np.zeros(size) for size in (SMALL, LARGE)}


def kept(size: int, array: bool) -> Any:
    return (_kept_arrays if array else _kept)[size]


@pytest.mark.parametrize("to", [0, 1])
@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("make", [torch.zeros, np.zeros])
class TestPrivate:
    def test_the_callee_writes(self, shared: Mesh, make: Any, size: int, to: int) -> None:
        mine = make(size)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            received = rpc.rpc_sync(to, fill, (mine,))
        assert (received == 7).all()
        assert (mine == 0).all()

    def test_the_caller_writes_the_result(
        self, shared: Mesh, make: Any, size: int, to: int
    ) -> None:
        received = rpc.rpc_sync(to, kept, (size, make is np.zeros))
        received[...] = 5
        assert (received == 5).all()
        assert (kept(size, make is np.zeros) == 0).all()

    def test_the_caller_writes_after_the_call(
        self, shared: Mesh, make: Any, size: int, to: int
    ) -> None:
        mine = make(size)
        futures = []
        for i in range(20):
            mine[...] = i
            futures.append(rpc.rpc_async(to, echo, (mine,)))
        mine[...] = -1
        for i, future in enumerate(futures):
            assert (future.wait() == i).all()


# -- gradients -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [SMALL, LARGE])
class TestGradients:
    def test_leaf(self, shared: Mesh, size: int) -> None:
        received = back(torch.zeros(size, requires_grad=True))
        assert received.requires_grad
        assert received.is_leaf
        received.sum().backward()
        assert received.grad.sum() == size

    def test_not_a_leaf_arrives_as_a_leaf(self, shared: Mesh, size: int) -> None:
        sent = torch.zeros(size, requires_grad=True) * 2
        received = back(sent)
        assert received.requires_grad
        assert received.is_leaf

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

    def test_no_gradient(self, shared: Mesh, size: int) -> None:
        assert not back(torch.zeros(size)).requires_grad

    @pytest.mark.parametrize("requires_grad", [True, False])
    def test_parameter(self, shared: Mesh, size: int, requires_grad: bool) -> None:
        received = back(torch.nn.Parameter(torch.zeros(size), requires_grad=requires_grad))
        assert type(received) is torch.nn.Parameter
        assert received.requires_grad is requires_grad

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

    def test_attributes_of_a_tensor_stay_here(self, shared: Mesh, size: int) -> None:
        """As in torch."""
        sent = torch.ones(size)
        sent.tag = threading.Lock()  # type: ignore[attr-defined]
        assert not hasattr(back(sent), "tag")

    def test_sent_without_grad_mode(self, shared: Mesh, size: int) -> None:
        with torch.no_grad():
            received = back(torch.zeros(size, requires_grad=True))
        assert received.requires_grad


# -- the receiver's own modes -----------------------------------------------------------------


class Doubled:
    """A value that torch computes on where it arrives."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        return Doubled._receive, (self.tensor,)

    @classmethod
    def _receive(cls, tensor: torch.Tensor) -> Doubled:
        return cls(tensor * 2)


MODES = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "inference with grad": lambda: _both(torch.inference_mode(), torch.enable_grad()),
}


@contextlib.contextmanager
def _both(first: Any, second: Any) -> Iterator[None]:
    with first, second:
        yield


@pytest.mark.parametrize("call", [rpc.rpc_sync, by_async, by_wait_all, by_remote])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_what_arrives_does_not_depend_on_modes(
    shared: Mesh, call: Callable[..., Any], mode: str, size: int
) -> None:
    sent = torch.ones(size, requires_grad=True)
    sparse = torch.ones(3).to_sparse()
    with MODES[mode]():
        before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        plain, leaf, doubled, (values, coo) = call(
            1, echo, (sent.detach(), sent, Doubled(sent), (sent[::2], sparse))
        )
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before
    for tensor in (plain, leaf, doubled.tensor, values, coo):
        assert not tensor.is_inference()
    assert not plain.requires_grad
    assert leaf.is_leaf
    assert leaf.requires_grad
    assert doubled.tensor.requires_grad
    weight = torch.ones(size, requires_grad=True)
    (plain * weight).sum().backward()  # which keeps what has arrived
    assert weight.grad is not None


def test_a_failure_to_read_a_value_leaves_the_modes(shared: Mesh) -> None:
    with torch.inference_mode():
        with pytest.raises(rpc.SerializationError):
            rpc.rpc_sync(1, Unreadable)
        assert torch.is_inference_mode_enabled()
        assert not torch.is_grad_enabled()


class Unreadable:
    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("x",)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_what_arrives_does_not_depend_on_default_device_and_dtype(shared: Mesh) -> None:
    dense = torch.eye(3)
    layouts = [dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc()]
    sent = [dense, torch.nn.Parameter(dense), dense.t()[:2], torch.ones(LARGE), *layouts]
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            received = back(sent)
    finally:
        torch.set_default_dtype(dtype)
    for tensor, was in zip(received, sent, strict=True):
        assert (tensor.device, tensor.dtype) == (was.device, was.dtype)
        assert torch.equal(tensor.to_dense(), was.to_dense())


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


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: _DENSE.to_sparse(),
        lambda: _DENSE.to_sparse(1),
        lambda: torch.sparse_coo_tensor([[0, 0, 1]], [1.0, 2.0, 3.0], (5,)),
        lambda: torch.sparse_coo_tensor(torch.empty(2, 0).long(), [], (3, 4)),
        lambda: torch.eye(3000).to_sparse(),
        lambda: _DENSE.to_sparse_csr(),
        lambda: _DENSE.to_sparse_csc(),
        lambda: _DENSE.to_sparse_bsr((2, 3)),
        lambda: _DENSE.to_sparse_bsc((3, 2)),
        lambda: torch.stack([_DENSE, _DENSE]).to_sparse_csr(),
        lambda: _DENSE.double().to_sparse_csr(),
    ],
    ids=[
        "coo",
        "hybrid",
        "uncoalesced",
        "empty",
        "large",
        "csr",
        "csc",
        "bsr",
        "bsc",
        "batched",
        "double",
    ],
)
def test_sparse(shared: Mesh, make: Callable[[], torch.Tensor], requires_grad: bool) -> None:
    sent = make()
    sent.requires_grad_(requires_grad)
    received = back(sent)
    assert received.layout == sent.layout
    assert (received.dtype, received.shape) == (sent.dtype, sent.shape)
    assert received.requires_grad is requires_grad
    if sent.layout is torch.sparse_coo:
        assert received.is_coalesced() == sent.is_coalesced()
        assert received.sparse_dim() == sent.sparse_dim()
        assert received._nnz() == sent._nnz()
    torch.testing.assert_close(received.detach().to_dense(), sent.detach().to_dense())


# -- containers ------------------------------------------------------------------------------


class Point(NamedTuple):
    x: torch.Tensor
    label: str = "p"


Old = collections.namedtuple("Old", ["x", "y"])


@dataclass
class Sample:
    x: torch.Tensor
    more: dict[str, list[torch.Tensor]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor


@pytest.mark.parametrize("size", [SMALL, LARGE])
class TestContainers:
    def test_named_tuples(self, shared: Mesh, size: int) -> None:
        received = back(Point(torch.ones(size)))
        assert type(received) is Point
        assert (received.x.sum(), received.label) == (size, "p")
        received = back(Old(1, torch.ones(size)))
        assert type(received) is Old
        assert received.y.sum() == size

    def test_dataclasses(self, shared: Mesh, size: int) -> None:
        received = back(Sample(torch.ones(size), {"a": [torch.ones(size)] * 2}))
        assert type(received) is Sample
        assert received.x.sum() == size
        assert received.more["a"][0] is received.more["a"][1]
        assert back(Frozen(torch.ones(size))).x.sum() == size

    def test_local_dataclass(self, shared: Mesh, size: int) -> None:
        @dataclass
        class Local:
            x: torch.Tensor

        received = back(Local(torch.ones(size)))
        assert type(received) is Local
        assert received.x.sum() == size

    def test_torchs_named_results(self, shared: Mesh, size: int) -> None:
        received = rpc.rpc_sync(1, torch.max, (torch.ones(2, size), 0))
        assert received.values.sum() == size
        assert type(received) is torch.return_types.max

    def test_module(self, shared: Mesh, size: int) -> None:
        module = torch.nn.Sequential(torch.nn.Linear(size, 2), torch.nn.BatchNorm1d(2)).eval()
        received = back(module)
        x = torch.randn(3, size)
        torch.testing.assert_close(received(x), module(x))
        assert not received.training
        received(x).sum().backward()

    def test_state_dict_and_optimizer(self, shared: Mesh, size: int) -> None:
        module = torch.nn.Linear(size, 1)
        optimizer = torch.optim.Adam(module.parameters())
        module(torch.ones(size)).backward()
        optimizer.step()
        received, state = back([optimizer.state_dict(), module.state_dict()])
        assert received["state"][0]["exp_avg"].shape == (1, size)
        torch.testing.assert_close(state["weight"], module.state_dict()["weight"])

    def test_many_tensors(self, shared: Mesh, size: int) -> None:
        received = back({i: torch.full((size // 10,), float(i)) for i in range(300)})
        assert [received[i][0].item() for i in range(300)] == list(range(300))


class Tagged(torch.Tensor):
    """A subclass, with an attribute."""


def test_tensor_subclass(shared: Mesh) -> None:
    sent = torch.ones(3).as_subclass(Tagged)
    sent.tag = "mine"  # type: ignore[attr-defined]
    received = back(sent)
    assert type(received) is Tagged
    assert received.tag == "mine"
    assert received.sum() == 3


def test_meta_tensor(shared: Mesh) -> None:
    received = back(torch.empty(10**6, 10**6, device="meta"))
    assert received.device.type == "meta"
    assert received.shape == (10**6, 10**6)


def test_packed_sequence(shared: Mesh) -> None:
    sent = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    received = back(sent)
    torch.testing.assert_close(received.data, sent.data)
    torch.testing.assert_close(received.batch_sizes, sent.batch_sizes)


def test_generator_state(shared: Mesh) -> None:
    torch.testing.assert_close(back(torch.get_rng_state()), torch.get_rng_state())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_nested_tensor(shared: Mesh) -> None:
    sent = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    received = back(sent)
    assert received.is_nested
    assert [t.tolist() for t in received.unbind()] == [t.tolist() for t in sent.unbind()]


# -- numpy -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.arange(SMALL),
        lambda: np.arange(LARGE),
        lambda: np.arange(LARGE).reshape(100, -1).T,
        lambda: np.asfortranarray(np.arange(LARGE).reshape(100, -1)),
        lambda: np.arange(LARGE)[::3],
        lambda: np.float32(1.5),
        lambda: np.array(5),
        lambda: np.empty((0, 3)),
        lambda: np.array(["a", "bc"] * LARGE),
        lambda: np.array([1, "a", None], dtype=object),
        lambda: np.array([(1, 2.0)] * LARGE, dtype=[("a", "i4"), ("b", "f8")]),
        lambda: np.array(["2020-01-01"], dtype="datetime64[D]"),
        lambda: np.arange(LARGE).astype(">i4"),
        lambda: np.ma.masked_array([1, 2], [True, False]),
    ],
)
def test_numpy(shared: Mesh, make: Callable[[], Any]) -> None:
    sent = make()
    received = back(sent)
    assert type(received) is type(sent)
    assert (received.dtype, received.shape) == (sent.dtype, sent.shape)
    np.testing.assert_array_equal(received, sent)


def test_only_the_elements_of_an_arrays_view_travel() -> None:
    assert travel(np.zeros((1000, 1000))[0]) <= 8000 + OVERHEAD_BYTES


def test_read_only_array(shared: Mesh) -> None:
    for size in (SMALL, LARGE):
        sent = np.arange(size)
        sent.flags.writeable = False
        received = back(sent)
        np.testing.assert_array_equal(received, sent)
        assert not received.flags.writeable


# -- size ------------------------------------------------------------------------------------


def test_a_hundred_megabytes(shared: Mesh) -> None:
    sent = torch.arange(25_000_000, dtype=torch.int32)
    assert torch.equal(back(sent), sent)


def test_large_and_small_at_once_from_many_threads(shared: Mesh) -> None:
    futures = [
        rpc.rpc_async(1, torch.add, (torch.full((size,), float(i)), 1))
        for i in range(40)
        for size in (1, 1000, 4096, 4097, LARGE)
    ]
    for i, future in enumerate(futures):
        assert (future.wait() == i // 5 + 1).all()

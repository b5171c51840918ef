"""Which bytes of a tensor are sent, and what tensor arrives: aligned, wherever they begin."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.wire.test_pickling import sent, there
from zrpc.errors import ProtocolError, SerializationError
from zrpc.testing import fake_device
from zrpc.wire.memory import ALIGNMENT, address_of, aligned
from zrpc.wire.message import parse
from zrpc.wire.tensor_reading import make_plain
from zrpc.wire.tensors import INLINE_BYTES, TensorWriter
from zrpc.wire.unpickling import Decoder

DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
]


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """Draws a view of a larger tensor."""
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    base = (torch.arange(torch.tensor(shape).prod().int().item() if shape else 1) % 2).to(dtype)
    tensor = base.reshape(shape)
    for _ in range(draw(st.integers(0, 3))):
        dims = tensor.dim()
        what = draw(st.sampled_from(["transpose", "step", "narrow", "expand"]))
        if dims >= 2 and what == "transpose":
            tensor = tensor.transpose(
                draw(st.integers(0, dims - 1)), draw(st.integers(0, dims - 1))
            )
        elif dims and what == "step":
            tensor = tensor[:: draw(st.integers(1, 3))]
        elif dims and what == "narrow" and tensor.shape[0] > 1:
            tensor = tensor[1:]
        elif what == "expand":
            tensor = tensor.unsqueeze(0).expand(2, *tensor.shape)
    return tensor


@pytest.mark.system
@given(views())
def test_views_arrive_equal_with_no_more_than_their_elements(tensor: torch.Tensor) -> None:
    copy = there(tensor)
    assert copy.dtype == tensor.dtype
    assert copy.shape == tensor.shape
    assert torch.equal(copy, tensor)
    needed = tensor.numel() * tensor.element_size()
    assert copy.untyped_storage().nbytes() <= needed + 16


def test_a_tensor_on_a_device_is_refused_without_a_device_map() -> None:
    fake_device()
    with pytest.raises(SerializationError, match=r"found one on fake:0.*send tensor\.cpu"):
        TensorWriter().add(torch.ones(2, device="fake:0"))


def test_received_tensors_are_not_views() -> None:
    for shape in ((), (1,), (5,), (2, 3), (300, 100), (INLINE_BYTES,)):
        for requires_grad in (False, True):
            copy = there(torch.ones(shape, requires_grad=requires_grad))
            assert copy.shape == shape
            assert copy.requires_grad == requires_grad
            assert copy._base is None
            copy.detach_().add_(1)  # the first is refused for views
            assert torch.equal(copy, torch.full(shape, 2.0))


def test_a_shape_that_does_not_fit_the_bytes_is_refused() -> None:
    for kind in (bytes, bytearray):
        for shape in ((2,), (4,), (2, 2), ()):
            with pytest.raises(ProtocolError, match="expected the bytes of a tensor"):
                make_plain(0, shape, kind(12))


def test_zeros_without_memory_arrive_as_zeros() -> None:
    """torch makes such tensors if a derivative is zero."""
    for requires_grad in (False, True):
        for size in (3, INLINE_BYTES):
            zeros = torch._efficientzerotensor((size,)).requires_grad_(requires_grad)
            assert torch.equal(there(zeros), torch.zeros(size))


def shrink(tensor: torch.Tensor, size: int = 0) -> torch.Tensor:
    """Returns the tensor without the memory that it needs, as FSDP leaves it."""
    tensor.untyped_storage().resize_(size)
    return tensor


def test_a_tensor_whose_memory_was_freed_is_refused() -> None:
    for count in (10, INLINE_BYTES):
        for make in (
            lambda n: shrink(torch.ones(n)),
            lambda n: shrink(torch.ones(n), 4 * n - 1),
            lambda n: shrink(torch.ones(n)[1:], 4 * n - 1),
            lambda n: shrink(torch.ones(n, requires_grad=True)),
            lambda n: shrink(torch.ones(2, n).t()),
            lambda n: [shrink(torch.ones(n, dtype=torch.complex64).conj())] * 2,
            lambda n: torch.sparse_coo_tensor(
                torch.zeros(1, n), shrink(torch.ones(n)), (n,), check_invariants=False
            ),
        ):
            tensor = make(count)
            with pytest.raises(
                SerializationError, match=r"expected a storage of .* it was resized"
            ):
                sent(tensor)


def test_all_of_a_storage_that_was_cut_to_a_tensor_arrives() -> None:
    tensor = torch.arange(10.0)[:5]
    tensor.untyped_storage().resize_(5 * 4)
    assert there(tensor).tolist() == [0, 1, 2, 3, 4]


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


def test_a_tensor_without_memory_of_its_own_is_refused() -> None:
    for make, words in (
        (lambda: torch.ones(3, 3).to_mkldnn(), r"_mkldnn: send tensor\.to_dense\(\)"),
        (fake, "a FakeTensor, which has a shape only"),
    ):
        with pytest.raises(SerializationError, match=words):
            sent([make()])


def test_a_tensor_inside_of_a_transform_is_refused() -> None:
    for transform in (torch.vmap, torch.func.grad, torch.func.functionalize, torch.func.jacrev):

        def send(x: torch.Tensor) -> torch.Tensor:
            with pytest.raises(SerializationError, match=r"inside of a transform of torch\.func"):
                sent(x)
            return x.sum()

        transform(send)(torch.ones(2, 3))


def test_a_view_of_a_quantized_tensor_sends_its_elements_only() -> None:
    whole = torch.quantize_per_tensor(torch.ones(100_000), 0.1, 1, torch.qint8)
    message = sent(whole[5:10])
    assert len(message.first_frame()) < 1000
    assert message.buffers == []


# -- alignment ---------------------------------------------------------------------------

# Enough elements for a frame of their own in any dtype. With the odd one, torch makes a copy that
# needs the alignment.
FRAMED = INLINE_BYTES + 1


def displaced(data: Any, by: int) -> memoryview:
    """Returns ``data`` copied to an address that is ``by`` more than a multiple of 16."""
    memory = memoryview(bytearray(len(data) + 2 * ALIGNMENT))
    start = (by - address_of(memory)) % ALIGNMENT
    memory[start : start + len(data)] = data
    return memory[start : start + len(data)]


def there_at(obj: Any, by: int) -> Any:
    """Returns the object as it arrives if all frames begin at such addresses."""
    message = sent(obj)
    frames = [displaced(memoryview(buffer).cast("B"), by) for buffer in message.buffers]
    assert frames
    return Decoder(None, parse(message.first_frame(), frames)).unpack()


def test_only_unaligned_bytes_are_copied() -> None:
    for by in range(ALIGNMENT):
        buffer = displaced(b"a" * 100, by)
        view = aligned(buffer)
        assert address_of(view) % ALIGNMENT == 0
        assert view == b"a" * 100
        view[0] = 0
        assert (buffer[0] == 0) is (by == 0)  # the same memory


ones = torch.ones(FRAMED, dtype=torch.complex128)


def test_tensors_arrive_aligned() -> None:
    for tensor in (
        ones,
        ones.reshape(3, -1),
        ones.reshape(3, -1).t(),
        ones.conj(),
        torch.nn.Parameter(ones),
        torch.ones(FRAMED, dtype=torch.float64),
        torch.ones(FRAMED, dtype=torch.uint8).repeat(2)[1:],
    ):
        for by in (0, 1, 8):
            received = there_at(tensor, by)
            assert received.data_ptr() % ALIGNMENT == 0
            assert torch.equal(received, tensor)
            assert torch.equal(received.clone(), tensor)  # this crashed the process


def test_arrays_arrive_aligned() -> None:
    for dtype in (np.complex128, np.clongdouble, np.float32):
        for by in (0, 1, 8):
            sent_array = np.arange(FRAMED, dtype=dtype)
            received = there_at(sent_array, by)
            assert received.flags.aligned
            assert received.ctypes.data % ALIGNMENT == 0
            np.testing.assert_array_equal(received, sent_array)
            if dtype is np.complex128:
                assert torch.equal(torch.from_numpy(received).clone(), torch.from_numpy(sent_array))
            received[0] = 5
            assert received[0] == 5

"""Large values arrive aligned, wherever the received bytes begin."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.wire.test_pickling import sent
from zrpc.wire.memory import ALIGNMENT, address_of, aligned
from zrpc.wire.message import parse
from zrpc.wire.tensors import INLINE_BYTES
from zrpc.wire.unpickling import Decoder

# Enough elements for a frame of their own in any dtype. With the odd one, torch makes a copy that
# needs the alignment.
SIZE = INLINE_BYTES + 1


def displaced(data: Any, by: int) -> memoryview:
    """Returns ``data`` copied to an address that is ``by`` more than a multiple of 16."""
    memory = memoryview(bytearray(len(data) + 2 * ALIGNMENT))
    start = (by - address_of(memory)) % ALIGNMENT
    memory[start : start + len(data)] = data
    return memory[start : start + len(data)]


def there(obj: Any, by: int) -> Any:
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


ones = torch.ones(SIZE, dtype=torch.complex128)


def test_tensors_arrive_aligned() -> None:
    for tensor in (
        ones,
        ones.reshape(3, -1),
        ones.reshape(3, -1).t(),
        ones.conj(),
        torch.nn.Parameter(ones),
        torch.ones(SIZE, dtype=torch.float64),
        torch.ones(SIZE, dtype=torch.uint8).repeat(2)[1:],
    ):
        for by in (0, 1, 8):
            received = there(tensor, by)
            assert received.data_ptr() % ALIGNMENT == 0
            assert torch.equal(received, tensor)
            assert torch.equal(received.clone(), tensor)  # this crashed the process


def test_arrays_arrive_aligned() -> None:
    for dtype in (np.complex128, np.clongdouble, np.float32):
        for by in (0, 1, 8):
            sent_array = np.arange(SIZE, dtype=dtype)
            received = there(sent_array, by)
            assert received.flags.aligned
            assert received.ctypes.data % ALIGNMENT == 0
            np.testing.assert_array_equal(received, sent_array)
            if dtype is np.complex128:
                assert torch.equal(torch.from_numpy(received).clone(), torch.from_numpy(sent_array))
            received[0] = 5
            assert received[0] == 5

"""How a value travels to another worker: what comes back, and how many bytes are sent."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

import zrpc as rpc
from tests.support.targets import echo
from zrpc.wire.member_id import member_id_of
from zrpc.wire.message import Message
from zrpc.wire.pickling import Encoder

# Sizes on both sides of the limit between the pickle and a frame of its own.
SMALL, LARGE = 10, 100_000
# For what a message has beside the elements: header, names, shapes.
OVERHEAD_BYTES = 2_000


def travel(obj: Any) -> int:
    """How many bytes travel for an object."""
    message = Message(1)
    Encoder(None, member_id_of(0, 0), True).pack(obj, message)
    buffers = sum(memoryview(buffer).nbytes for buffer in message.buffers)
    return len(message.first_frame()) + buffers


def back(value: Any, to: int = 1) -> Any:
    return rpc.rpc_sync(to, echo, (value,))


def bits(tensor: torch.Tensor) -> bytes:
    """The elements as bytes, whatever the dtype."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return ctypes.string_at(plain.data_ptr(), plain.numel() * plain.element_size())


def assert_same(received: torch.Tensor, sent: torch.Tensor) -> None:
    assert type(received) is type(sent)
    assert received.dtype == sent.dtype
    assert received.shape == sent.shape
    assert received.layout == sent.layout
    assert received.requires_grad == sent.requires_grad
    torch.testing.assert_close(received, sent, rtol=0, atol=0, equal_nan=True)

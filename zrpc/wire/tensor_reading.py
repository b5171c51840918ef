"""What messages say of tensors, and how they are made from that.

See `zrpc.wire.tensors` for the way there.
"""

from __future__ import annotations

import ctypes
import math
import pickle
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from zrpc.errors import ProtocolError
from zrpc.wire.devices import CPU, to_device
from zrpc.wire.memory import aligned
from zrpc.wire.views import Relation

_CPU = torch.device("cpu")

# The dtypes of plain tensors. Messages contain their indices, so a new one goes to the end.
PLAIN_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
PLAIN_NUMBERS = {dtype: number for number, dtype in enumerate(PLAIN_DTYPES)}
DTYPES = {str(v): v for v in vars(torch).values() if isinstance(v, torch.dtype)}

# Flags.
REQUIRES_GRAD = 1
PARAMETER = 2
CONJUGATE = 4
NEGATIVE = 8
META = 16

# One storage: its bytes, or the index of its frame. On a device, this, the device and a dtype.
Bytes = bytes | int
StorageRow = Bytes | tuple[Bytes, str, str]
# One tensor: the index of its storage (-1 or a device: none), the offset there in bytes, dtype,
# shape, stride, flags.
TensorRow = tuple[int | str, int, str, tuple[int, ...], tuple[int, ...], int]
# A contiguous tensor that shares no memory: the number of its dtype, shape, storage, flags.
WholeRow = tuple[int, tuple[int, ...], StorageRow, int]
WHOLE_FIELDS = 4
# A plain tensor: the number of its dtype, shape, bytes.
PlainRow = tuple[int, tuple[int, ...], bytes | pickle.PickleBuffer]


def make_plain(number: int, shape: tuple[int, ...], data: Any) -> torch.Tensor:
    """Makes a plain tensor from its row.

    Args:
        number: the number of its dtype.
        shape: its shape.
        data: its bytes, which are copied; or another buffer, whose memory the tensor then shares:
            see `aligned`.
    """
    dtype = PLAIN_DTYPES[number]
    if type(data) is bytes:  # read-only
        tensor = torch.frombuffer(bytearray(data), dtype=dtype)
    else:
        tensor = torch.frombuffer(data, dtype=dtype)
    if math.prod(shape) != tensor.numel():
        raise ProtocolError(f"expected the bytes of a tensor of {shape}, found {tensor.numel()}")
    # Not by a view: `detach_` refuses views.
    if len(shape) == 1:
        return tensor
    # torch parses the sizes in two thirds of the time if they are separate arguments.
    return tensor.resize_(*shape) if shape else tensor.resize_(shape)


def read_table(
    table: bytes | bytearray | memoryview, buffers: Sequence[Any]
) -> tuple[list[torch.Tensor], list[Relation]]:
    """Makes the tensors of a message, and returns them with the relations between views and bases.

    Large ones share the memory of their frames in ``buffers``, without a copy.
    """
    storages, rows, relations = pickle.loads(table)
    made = [_make_storage(row, buffers) for row in storages]
    shared = Counter(row[0] for row in rows if len(row) != WHOLE_FIELDS) if made else {}
    tensors = [
        _make_whole(row, buffers)
        if len(row) == WHOLE_FIELDS
        else _make_tensor(row, made, shared.get(row[0], 0) > 1)
        for row in rows
    ]
    return tensors, relations


def _make_storage(row: StorageRow, buffers: Sequence[Any]) -> torch.Tensor:
    """Returns the bytes of a storage as a tensor; on a device, in the dtype that the row says."""
    if isinstance(row, tuple):
        data, device, dtype = row
        return to_device(_make_storage(data, buffers).view(DTYPES[dtype]), device)
    if isinstance(row, int):
        return torch.frombuffer(aligned(buffers[row]), dtype=torch.uint8)
    whole = torch.empty(len(row), dtype=torch.uint8, device=_CPU)
    ctypes.memmove(whole.data_ptr(), row, len(row))
    return whole


def _make_whole(row: WholeRow, buffers: Sequence[Any]) -> torch.Tensor:
    number, shape, storage, flags = row
    device = CPU
    if isinstance(storage, tuple):
        storage, device, _ = storage
    data = aligned(buffers[storage]) if isinstance(storage, int) else storage
    tensor = make_plain(number, shape, data)
    return _with_flags(tensor if device == CPU else to_device(tensor, device), flags)


def _make_tensor(row: TensorRow, storages: list[torch.Tensor], shared: bool) -> torch.Tensor:
    index, offset, dtype_name, shape, stride, flags = row
    dtype = DTYPES[dtype_name]
    if isinstance(index, str) or index < 0:
        device = "meta" if flags & META else index if isinstance(index, str) else _CPU
        tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    elif shared or not storages[index].is_cpu:
        # A view of the whole, without being one for autograd, has its version counter.
        whole = storages[index]
        if whole.dtype is not dtype:
            size = whole.nbytes - whole.nbytes % dtype.itemsize
            whole = whole[: size // whole.itemsize].view(dtype)
        tensor = whole.as_strided(shape, stride, offset // dtype.itemsize).detach()
    else:
        tensor = torch.empty(0, dtype=dtype, device=_CPU)
        with torch.no_grad():
            storage = storages[index].untyped_storage()
            tensor.set_(storage, offset // dtype.itemsize, shape, stride)
    return _with_flags(tensor, flags)


def _with_flags(tensor: torch.Tensor, flags: int) -> torch.Tensor:
    if flags & NEGATIVE:
        tensor = torch._neg_view(tensor)
    if flags & CONJUGATE:
        tensor = tensor.conj()
    if flags & PARAMETER:
        return torch.nn.Parameter(tensor, requires_grad=bool(flags & REQUIRES_GRAD))
    if flags & REQUIRES_GRAD:
        tensor.requires_grad_()
    return tensor

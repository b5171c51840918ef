"""What messages say of a tensor: the rows of the tensor table, and plain tensors in the pickle."""

from __future__ import annotations

import pickle

import torch

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

"""Memory of the fake device: tensors whose bytes no code but this module can read.

The memory is from malloc. torch sees its address with a bit set that no address of a process has.
So code that reads a device's memory as if it were the CPU's gets a segmentation fault, as it would
with a GPU. torch frees the memory itself when the last tensor that uses it is gone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

# Set in addresses of the fake device.
_TAG = 1 << 60
# DLPack's number for a kind of device that others add, and for unsigned integers.
_EXTENSION, _UNSIGNED = 12, 1
# The bytes before the tensor's own, which hold its description; a multiple of any alignment.
_HEAD_BYTES = 128

_STRUCTURE = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = [ctypes.c_size_t]
_FREE = ctypes.cast(_libc.free, ctypes.c_void_p).value
_new_capsule: Any = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class _Managed(ctypes.Structure):
    """``DLManagedTensor`` of DLPack, and a shape of one dimension after it."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("dimensions", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("length", ctypes.c_int64),
    )


def allocate(
    size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, index: int
) -> torch.Tensor:
    """Returns a new tensor on the fake device, with any values."""
    extent = 0 if 0 in size else 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    length = extent * dtype.itemsize
    block = _libc.malloc(_HEAD_BYTES + length)
    if not block:
        raise MemoryError(f"expected {length} bytes for a tensor of the fake device, found fewer")
    description = _Managed.from_address(block)
    description.data = (block + _HEAD_BYTES) | _TAG
    description.device_type, description.device_index = _EXTENSION, index
    description.dimensions, description.length = 1, length
    description.code, description.bits, description.lanes = _UNSIGNED, 8, 1
    description.shape = block + _Managed.length.offset
    description.strides = description.context = None
    description.byte_offset = 0
    description.deleter = _FREE  # gets the block's address: the description is its beginning
    flat = from_dlpack(_new_capsule(block, b"dltensor", None))
    typed = torch.ops.aten.view.dtype.redispatch(_STRUCTURE, flat, dtype)
    return torch.ops.aten.as_strided.default.redispatch(_STRUCTURE, typed, size, stride, 0)  # type: ignore[no-any-return]


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of the CPU that has the memory of one of the fake device."""
    storage = tensor.untyped_storage()
    length = storage.nbytes()
    if length:
        window = (ctypes.c_char * length).from_address(storage.data_ptr() & ~_TAG)
        window.owner = storage  # type: ignore[attr-defined]
        whole = torch.frombuffer(window, dtype=torch.uint8)
    else:
        whole = torch.empty(0, dtype=torch.uint8, device="cpu")
    found = torch.empty(0, dtype=tensor.dtype, device="cpu")
    found.set_(whole.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    if tensor.is_conj():
        found = found.conj()
    return torch._neg_view(found) if tensor.is_neg() else found

"""Tensors on the wire: which bytes of a storage are sent.

Plain tensors are part of the pickle itself, which is fastest. Their bytes are in the pickle as well
or, if they are large, in frames of their own. All other tensors have a row in the tensor table, and
the pickle only says "tensor 3". The table is made when all tensors of the message are known, so
tensors that share memory share it on arrival, too; in such a message plain tensors are in the table
as well, and the table lists the views and their bases. If a tensor shares its memory with no
other, only its own elements are sent. The bytes of small storages are in the table, and large
storages are frames of their own. All of this holds for tensors on devices as well: the table also
says which device they arrive on.

Sparse tensors are pickled as the dense tensors that they consist of. All others (quantized tensors,
subclasses) are pickled as torch does, with their storages in the table.
"""

from __future__ import annotations

import ctypes
import itertools
import pickle
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from zrpc.errors import SerializationError
from zrpc.wire.devices import CPU, DeviceMap, finest, flattened, unmapped
from zrpc.wire.memory import ALIGNMENT, begin_of, end_of, extent_of, window
from zrpc.wire.tensor_reading import (
    CONJUGATE,
    META,
    NEGATIVE,
    PARAMETER,
    PLAIN_DTYPES,
    PLAIN_NUMBERS,
    REQUIRES_GRAD,
    Bytes,
    PlainRow,
    StorageRow,
    TensorRow,
    WholeRow,
)
from zrpc.wire.views import Relation, base_of, is_changeable, span_of

# Up to this size, bytes are part of the pickle or the table. Above it, a frame of its own costs
# less than these copies.
INLINE_BYTES = 32 * 1024

# Up to this size, the bytes of a tensor are copied before they are pickled. That costs less than
# having the pickler read them.
_COPIED_BYTES = 16 * 1024
_FIRST_COMPLEX = PLAIN_DTYPES.index(torch.complex64)

# The function behind `ctypes.string_at`, called directly.
_copy_of: Any = ctypes.pythonapi.PyBytes_FromStringAndSize
_copy_of.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t]
_copy_of.restype = ctypes.py_object

# Returns the attributes that a program has set on a tensor, or None. A tensor that is asked for its
# `__dict__` makes one.
attributes_of: Any = object.__getstate__

_STRIDED = torch.strided


class TensorWriter:
    """Collects the tensors of one message. For one thread.

    Args:
        plain: whether plain tensors are part of the pickle.
        devices: where tensors on devices arrive; None if there must be none.

    Attributes:
        target: the device that the first of them arrives on, other than the CPU; "" if none does.
    """

    def __init__(self, plain: bool = True, devices: DeviceMap | None = None) -> None:
        # With the flags of each, and the device that it arrives on.
        self._tensors: list[tuple[torch.Tensor, int, str]] = []
        self._devices = devices
        self.target = ""
        # The tensors that require grad, as they were given, by index.
        self.requiring_grad: dict[int, torch.Tensor] = {}
        # The indices of tensors whose memory overlaps, and which of them are views of others.
        self._groups: list[list[int]] = []
        self._relations: list[Relation] = []
        # The first address of each plain tensor in the pickle, and the one after its last; None if
        # there may be no tensors in the pickle.
        plain = plain and not (devices is not None and devices.moves_cpu)
        self._plain: list[tuple[int, int]] | None = [] if plain else None

    def __len__(self) -> int:
        return len(self._tensors)

    def add_plain(self, tensor: torch.Tensor) -> PlainRow | None:
        """Returns the arguments of `make_plain`, or None if the tensor is not plain: use `add`."""
        number = PLAIN_NUMBERS.get(tensor.dtype)  # None for quantized tensors
        if (
            number is None
            or self._plain is None
            or tensor.requires_grad
            or tensor.layout is not _STRIDED
            or type(tensor) is not torch.Tensor
            or not (tensor.is_cpu and tensor.is_contiguous())
            or (number >= _FIRST_COMPLEX and tensor.is_conj())
            or tensor.is_neg()
            or tensor.is_nested
            or attributes_of(tensor) is not None
        ):
            return None
        size = tensor.nbytes
        if not size:
            return None
        start = tensor.data_ptr()
        if not start:
            return None
        end = start + size
        storage = tensor.untyped_storage()  # as in `add`, but without its calls
        if end > storage.data_ptr() + storage.nbytes():
            raise _freed_memory_error(tensor)
        self._plain.append((start, end))
        if size <= _COPIED_BYTES:
            return number, tuple(tensor.shape), _copy_of(start, size)
        return number, tuple(tensor.shape), pickle.PickleBuffer(window(start, size, tensor))

    @property
    def placed(self) -> bool:
        """Whether any tensor was or arrives on a device, so that the device map counts."""
        return any(target != CPU or not (t.is_cpu or t.is_meta) for t, _, target in self._tensors)

    @property
    def overlapping(self) -> bool:
        """Whether a tensor in the pickle shares memory with another of the message.

        If so, the message must be packed again, with all of its tensors in the table.
        """
        spans = self._plain
        if not spans or len(spans) + len(self._tensors) == 1:
            return False
        others = [t for t, _, _ in self._tensors if t.numel() and t.is_cpu]
        starts = [t.data_ptr() - begin_of(t) for t in others]
        ends = [(s + begin_of(t), s + end_of(t)) for s, t in zip(starts, others, strict=True)]
        ends = sorted(spans + ends)
        return any(second[0] < first[1] for first, second in itertools.pairwise(ends))

    def add(self, tensor: torch.Tensor) -> int:
        """Adds a strided tensor to the table and returns its index."""
        flags = 0
        plain = tensor
        if tensor.requires_grad:
            flags = REQUIRES_GRAD
            plain = tensor.detach()
            self.requiring_grad[len(self._tensors)] = tensor
        if type(tensor) is torch.nn.Parameter:
            flags |= PARAMETER
        if plain.is_conj():
            plain, flags = plain.conj(), flags | CONJUGATE
        if plain.is_neg():
            plain, flags = torch._neg_view(plain), flags | NEGATIVE
        target = CPU
        if plain.is_meta:
            flags |= META
        else:
            if plain._is_zerotensor():  # it has no memory
                plain = plain.clone()
            if self._devices is not None:
                target = self._devices.target(plain)
                self.target = self.target or (target if target != CPU else "")
            elif not plain.is_cpu:
                raise unmapped(plain)
            if not (plain.is_cpu or torch._C._has_storage(plain)):
                plain = plain.cpu()
            if plain.numel():
                storage = plain.untyped_storage()
                if plain.is_cpu:
                    storage.data_ptr()  # fails now if it has none, as inside of a transform
                if end_of(plain) > storage.nbytes():
                    raise _freed_memory_error(plain)
        self._tensors.append((plain, flags, target))
        return len(self._tensors) - 1

    def table(self, buffers: list[Any]) -> bytes:
        """Returns the table of all tensors added; appends the large storages to ``buffers``.

        Call `group` before.
        """
        if not self._tensors:
            return b""
        storages: list[StorageRow] = []
        rows: list[TensorRow | WholeRow | None] = [None] * len(self._tensors)
        for indices in self._groups:
            tensors = [self._tensors[index][0] for index in indices]
            target = self._tensors[indices[0]][2]
            if len(tensors) == 1:
                rows[indices[0]] = _whole_row(*self._tensors[indices[0]], buffers)
                if rows[indices[0]] is not None:
                    continue
                tensors = [_dense(tensors[0])]
            start = min(map(begin_of, tensors))
            start -= start % ALIGNMENT  # offsets must stay multiples of an element
            for index, tensor in zip(indices, tensors, strict=True):
                offset = begin_of(tensor) - start
                rows[index] = _row(tensor, self._tensors[index][1], len(storages), offset)
            storages.append(_storage_row(tensors, start, target, buffers))
        for index, (tensor, flags, target) in enumerate(self._tensors):
            if rows[index] is None:
                rows[index] = _row(tensor, flags, -1 if target == CPU else target)
        return pickle.dumps((storages, rows, self._relations), pickle.HIGHEST_PROTOCOL)

    def group(self, in_graph: bool) -> None:
        """Finds the tensors that share memory. Call it when all tensors are added.

        Args:
            in_graph: whether tensors that require grad stay part of a graph; if not, they arrive
                as leaves, which are no views.
        """
        some = [i for i, (t, _, _) in enumerate(self._tensors) if t.numel() and not t.is_meta]
        if len(some) < 2:
            self._groups = [some] if some else []
            return
        sharing: dict[int, list[int]] = {}
        for index in some:
            tensor = self._tensors[index][0]
            storage = tensor.untyped_storage()
            # Several storages may share memory on the CPU. On a device it may have no address.
            key = storage.data_ptr() if tensor.is_cpu else storage._cdata
            sharing.setdefault(key, []).append(index)
        self._groups = list(self._overlapping(sharing.values()))
        for indices in self._groups:
            if len(indices) > 1:
                self._relate(indices, in_graph)

    def _relate(self, indices: list[int], in_graph: bool) -> None:
        """Finds the views in a group; adds what they are views of, if that is missing."""
        families: dict[int, list[tuple[int, torch.Tensor, torch.Tensor]]] = {}
        for index in indices:
            tensor = self.requiring_grad.get(index, self._tensors[index][0])
            base = base_of(tensor)
            if base is not None and (in_graph or not tensor.requires_grad):
                families.setdefault(id(base), []).append((index, tensor, base))
        for family in families.values():
            base = family[0][2]
            if len(family) == 1:
                continue
            number = next((index for index, tensor, _ in family if tensor is base), -1)
            if number < 0:  # the base is not in the message: its part is sent along with its views
                if not any(tensor.requires_grad for _, tensor, _ in family):
                    base = base.detach()
                number = self.add(span_of(base, [tensor for _, tensor, _ in family]))
                indices.append(number)
            self._relations.extend(
                Relation(index, number, is_changeable(tensor))
                for index, tensor, _ in family
                if index != number
            )

    def _overlapping(self, sharing: Iterable[list[int]]) -> Iterator[list[int]]:
        """Divides tensors that share a storage into groups whose memory overlaps."""
        for indices in sharing:
            if len(indices) == 1:
                yield indices
                continue
            indices.sort(key=lambda i: begin_of(self._tensors[i][0]))
            group: list[int] = []
            end = 0
            for index in indices:
                tensor = self._tensors[index][0]
                if group and begin_of(tensor) >= end:
                    yield group
                    group = []
                group.append(index)
                end = max(end, end_of(tensor))
            yield group


def _freed_memory_error(tensor: torch.Tensor) -> SerializationError:
    return SerializationError(
        f"expected a storage of {end_of(tensor)} bytes or more below a tensor of shape "
        f"{tuple(tensor.shape)}, found one of {tensor.untyped_storage().nbytes()} bytes: it was "
        "resized, as FSDP does to free it; send the tensor before that"
    )


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor itself if its span of memory holds nothing else, otherwise a copy."""
    if extent_of(tensor) <= tensor.numel():
        return tensor
    return tensor.clone(memory_format=torch.preserve_format)


def _row(tensor: torch.Tensor, flags: int, storage: int | str = -1, offset: int = 0) -> TensorRow:
    return storage, offset, str(tensor.dtype), tuple(tensor.shape), tensor.stride(), flags


def _whole_row(
    tensor: torch.Tensor, flags: int, target: str, buffers: list[Any]
) -> WholeRow | None:
    """Returns the short row of a tensor that shares no memory, or None if it needs a long one."""
    number = PLAIN_NUMBERS.get(tensor.dtype)
    if number is None or not tensor.is_contiguous():
        return None
    storage: StorageRow
    if tensor.is_cpu and target == CPU:  # as `_storage_row`, in half the time
        storage = _bytes_of(tensor.data_ptr(), tensor.nbytes, tensor, buffers)
    else:
        storage = _storage_row([tensor], begin_of(tensor), target, buffers)
    return number, tuple(tensor.shape), storage, flags


def _storage_row(
    tensors: list[torch.Tensor], start: int, target: str, buffers: list[Any]
) -> StorageRow:
    """Returns the row of the bytes that tensors share, from ``start`` on."""
    end = max(map(end_of, tensors))
    if tensors[0].is_cpu:
        place = tensors[0].untyped_storage().data_ptr() + start
        data = _bytes_of(place, end - start, tensors, buffers)
    else:
        memory = flattened(tensors, start, end)
        if memory.nbytes > INLINE_BYTES:  # copied when all buffers of the message are known
            buffers.append(memory)
            data = len(buffers) - 1
        else:
            memory = memory.cpu()
            data = _bytes_of(memory.data_ptr(), memory.nbytes, memory, buffers)
    return data if target == CPU else (data, target, str(finest(tensors).dtype))


def _bytes_of(start: int, size: int, owner: Any, buffers: list[Any]) -> Bytes:
    if size <= INLINE_BYTES:
        copied: bytes = _copy_of(start, size)
        return copied
    buffers.append(window(start, size, owner))
    return len(buffers) - 1

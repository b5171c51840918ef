"""Tensors on devices such as GPUs: where they arrive, and how they are copied.

They go through the CPU: the sender copies them to its memory, and the receiver copies them to the
device that the device map names. ``torch.Tensor.to`` orders itself with the device's work on the
current stream of its thread, so this is right for every device that torch knows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zrpc import stand_in
from zrpc.errors import SerializationError
from zrpc.wire.memory import address_of, window
from zrpc.wire.page_locks import page_locks

CPU = "cpu"
KEEP = "="
# What torch says first; programs that run unmodified may look for it.
_TORCH_SAYS = (
    "TensorPipe RPC backend only supports CPU tensors by default, please move your tensors to CPU "
    "before sending them over RPC, or call `set_device_map` on `TensorPipeRpcBackendOptions` to "
    "explicitly configure device mapping. "
)
# Buffers that share memory begin at multiples of this.
_ALIGNMENT_BYTES = 64


class UnmappedDevice(SerializationError):
    """A tensor is on a device that the device map doesn't name."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceMap:
    """Where the tensors of one worker's messages to another one arrive.

    Attributes:
        sender: the name of the worker that has the tensors.
        receiver: the name of the other one.
        targets: for each device of the sender the receiver's, as text.
        others: where tensors on other devices arrive: ``"cpu"``, or `KEEP` for the same device;
            empty if they are refused.
        answers: whether this holds for answers; if not, it does for requests.
        current: the device that is current while the receiver runs a handler, if no argument says
            which; empty if the map names none but the CPU.
        moves_cpu: whether tensors on the CPU arrive on another device.

    Two are equal if tensors arrive on the same devices.
    """

    sender: str = ""
    receiver: str = ""
    targets: Mapping[str, str] = field(default_factory=dict)
    others: str = ""
    answers: bool = False
    current: str = ""
    moves_cpu: bool = field(init=False)  # each message with tensors needs it

    def __post_init__(self) -> None:
        object.__setattr__(self, "moves_cpu", self.targets.get(CPU, CPU) != CPU)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeviceMap) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> object:
        return frozenset(self.targets.items()), self.others

    def target(self, tensor: torch.Tensor) -> str:
        """Returns the device that a tensor arrives on.

        Raises:
            UnmappedDevice: the map doesn't name the tensor's device.
        """
        device = CPU if tensor.is_cpu else str(tensor.device)
        found = self.targets.get(device, CPU if device == CPU else self.others)
        if not found:
            raise UnmappedDevice(self._advice(device))
        return device if found == KEEP else found

    def _advice(self, device: str) -> str:
        kind, found = ("Response", "the result has") if self.answers else ("Request", "there is")
        caller, callee = self.sender, self.receiver
        if self.answers:
            caller, callee = callee, caller
        return (
            f"{_torch_says()}{kind} device mapping is not available "
            f"for destination {self.receiver}: {found} a tensor on {device} of {self.sender}, and "
            f"{caller}'s device map for {callee} names no device for it. Call "
            f'options.set_device_map("{callee}", {{"{device}": "{device}"}}) on {caller} before '
            "init_rpc; or send tensor.cpu(), and call .to(device) on arrival; or keep a module and "
            f'its tensors there in zrpc.nn.RemoteModule("{callee}/{device}", ...)'
        )


# For gradients: each is put on the device of its tensor when it has arrived.
TO_CPU = DeviceMap(others=CPU)


def _torch_says() -> str:
    return _TORCH_SAYS if stand_in.is_active() else ""


def unmapped(tensor: torch.Tensor) -> UnmappedDevice:
    """Returns the error of a tensor in what is packed for no worker in particular."""
    return UnmappedDevice(
        f"{_torch_says()}expected tensors on the CPU, found one on {tensor.device}, and no device "
        "map: send tensor.cpu(), and move it on arrival"
    )


def finest(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the tensor with the smallest elements: those of the others are aligned for them."""
    return min(tensors, key=lambda tensor: tensor.element_size())


def flattened(tensors: Sequence[torch.Tensor], start: int, end: int) -> torch.Tensor:
    """Returns bytes of the storage that tensors share as one tensor, on their device.

    Args:
        tensors: the dtype is that of the `finest` one.
        start: the first byte, aligned for each of them.
        end: the byte after the last one.
    """
    tensor = finest(tensors)
    size = tensor.element_size()
    return tensor.as_strided(((end - start) // size,), (1,), start // size)


def fetched(buffers: Sequence[Any], memory: Callable[[int], Any] | None) -> list[Any]:
    """Copies the buffers of a message that are tensors on devices; returns all of its buffers.

    Args:
        buffers: the buffers. Tensors among them are contiguous.
        memory: returns memory of this size that the message is sent from without another copy; or
            None if there is none.
    """
    if not any(isinstance(buffer, torch.Tensor) for buffer in buffers):
        return list(buffers)
    sizes = [b.nbytes if isinstance(b, torch.Tensor) else memoryview(b).nbytes for b in buffers]
    padded = [-(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for size in sizes]
    whole = memory(sum(padded)) if memory is not None else None
    if whole is None:
        return [_on_cpu(b) if isinstance(b, torch.Tensor) else b for b in buffers]
    devices = [buffer.device for buffer in buffers if isinstance(buffer, torch.Tensor)]
    start = address_of(whole)
    page_locks.note_copy(start, sum(sizes), devices)
    rest = memoryview(whole).cast("B")
    copies = []
    for buffer, size, step in zip(buffers, sizes, padded, strict=True):
        copy, rest = rest[:size], rest[step:]
        _copy(buffer, copy)
        copies.append(copy)
    return copies


def _on_cpu(tensor: torch.Tensor) -> Any:
    copy = tensor.cpu()
    return window(copy.data_ptr(), copy.nbytes, copy)


def _copy(buffer: Any, target: memoryview) -> None:
    if isinstance(buffer, torch.Tensor):
        torch.frombuffer(target, dtype=buffer.dtype).view(buffer.shape).copy_(buffer)
        return
    source = memoryview(buffer).cast("B")
    if source.readonly:
        target[:] = source
    else:  # other threads can run meanwhile
        ctypes.memmove(address_of(target), address_of(source), source.nbytes)


def to_device(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Returns a copy of a tensor on a device.

    Raises:
        RuntimeError: there is no such device, or no memory on it.
    """
    device = torch.device(name)
    module = torch.get_device_module(device)
    dense = tensor.layout is torch.strided and not tensor.is_nested
    if not (dense and hasattr(module, "Stream") and hasattr(module, "stream")):
        return tensor.to(device)
    page_locks.note_copy(tensor.data_ptr(), tensor.nbytes, [device])
    # On a stream of its own: on the current one it would wait for all work that is queued there,
    # such as a collective that waits for this worker. The copy has ended when `to` returns.
    stream = _streams.get(device)
    if stream is None:
        stream = _streams.setdefault(device, module.Stream(device=device))
    with module.stream(stream):
        copy = tensor.to(device)
    # Its memory belongs to that stream. It is not used again before what this thread does with it.
    copy.record_stream(module.current_stream(device))
    return copy


# For the copies to each device. Single operations on the dict are atomic.
_streams: dict[torch.device, Any] = {}

"""What workers do on a device. Worker processes import this, so its globals are theirs."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any

import torch

from zrpc.testing import fake_device
from zrpc.wire.page_locks import CudaRuntime, MappedMemory, page_locks

stop = threading.Event()
burning = threading.Event()
occupied: Any = None
_limits: list[AbstractContextManager[None]] = []


def burn(device: str) -> int:
    """Multiplies on a device until `stop` is set; returns how often."""
    square, count = torch.eye(256, device=device), 0
    while not stop.wait(0.0):
        square, count = square @ square, count + 1
        burning.set()
    return count


def await_burning() -> bool:
    return burning.wait(60)


def set_stop() -> None:
    stop.set()


def limit_memory(device: str, nbytes: int) -> None:
    """Lets allocations of more than this many bytes fail in this process."""
    if device.startswith("fake"):
        _limits.append(fake_device().out_of_memory(above=nbytes))
        _limits[0].__enter__()
        return
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    torch.cuda.set_per_process_memory_fraction((reserved + nbytes) / total, device)


def lift_limit(device: str) -> None:
    if device.startswith("fake"):
        _limits.pop().__exit__(None, None, None)
    else:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def on(device: str, *tensors: torch.Tensor) -> None:
    """Fails unless all tensors are on this device."""
    assert [str(each.device) for each in tensors] == [device] * len(tensors)


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


def describe(value: Any) -> list[Any]:
    """Returns what must be alike at both ends."""
    if isinstance(value, torch.Tensor):
        dense = value.detach().cpu()
        dense = dense.to_dense() if dense.is_sparse else dense
        layout = str(value.layout) if value.is_sparse else value.stride()
        kind = type(value).__name__, str(value.dtype), str(value.device), value.requires_grad
        return [*kind, tuple(value.shape), layout, dense.resolve_conj().tolist()]
    return [describe(each) for each in value]


def locked_bytes() -> int:
    return page_locks.nbytes


def lock_twice(device: str) -> tuple[list[bool], float]:
    """Locks the same memory twice, which CUDA refuses; returns what it said, and a sum of 100."""
    memory = MappedMemory(-1, 1 << 20)
    runtime, place = CudaRuntime(), torch.device(device)
    locked = [runtime.lock(memory.address, len(memory), place) for _ in range(2)]
    total = torch.ones(100, device=device).sum().item()
    runtime.unlock(memory.address)
    return locked, total

"""Page-locked memory, which a device reads and writes by itself, as fast as its bus allows.

What is copied between a device and other memory goes through a buffer of the driver. Measured on an
H100: 16 MiB take 1.0 ms that way, and 0.3 ms from or to memory that is locked. But locking it takes
as long as one copy to fifty, depending on its size. So a segment of shared memory is locked when
much has been copied.

Unlocking waits for all work that the device was given. That may be a collective that waits for
another worker, so nothing may wait for the unlocking: a thread of its own does it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable

import torch

from zrpc.runtime.forks import free_in_child
from zrpc.runtime.interrupts import UninterruptedLock
from zrpc.wire.memory import address_of

# The type of devices whose driver can lock memory.
_LOCKING = "cuda"
# Memory is locked when this many times its size was copied.
COPIES = 8
# The maximum of a process. The system can't swap out what is locked.
MAX_BYTES = 1 << 32
# So that it counts as locked for all devices.
_PORTABLE = 1


class CudaRuntime:
    """Locks memory by CUDA. Both methods let other threads run.

    Source: https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__MEMORY.html
    """

    def lock(self, address: int, nbytes: int, device: torch.device) -> bool:
        """Locks memory; returns whether it could."""
        with torch.cuda.device(device):  # else CUDA would begin to use its first device
            runtime = torch.cuda.cudart()
            error = runtime.cudaHostRegister(address, nbytes, _PORTABLE)
            if error == runtime.cudaError.success:
                return True
            # CUDA keeps the error for whatever asks next, such as the check after a kernel.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=device)
            return False

    def unlock(self, address: int) -> None:
        """Unlocks the memory that begins there, when the devices have no work left."""
        torch.cuda.cudart().cudaHostUnregister(address)


class MappedMemory(mmap.mmap):
    """Mapped memory that can be locked.

    Attributes:
        copied: how many bytes were copied between it and a device.
        locked_by: what has locked it, if anything. Then it stays mapped until it is unlocked.
    """

    copied: float = 0
    locked_by: PageLocks | None = None

    @property
    def address(self) -> int:
        """The address of its first byte."""
        return address_of(self)

    def end(self) -> None:
        """Stays mapped until it is unlocked, if it is locked: for `__del__`."""
        if self.locked_by is not None:
            self.locked_by.ended.append(self)


class _LockedMemory(MappedMemory):
    """Memory that is locked. Other memory has no `__del__`, which a Ctrl-C could be lost in."""

    def __del__(self) -> None:
        self.end()


class PageLocks:
    """The mapped memory of this process that is locked, or may be. Any thread may use it.

    Args:
        driver: locks and unlocks memory.
        limit: the maximum number of bytes that are locked.

    Attributes:
        nbytes: the number of bytes that are locked.
        ended: locked memory that nothing refers to any longer.
    """

    def __init__(self, driver: CudaRuntime, limit: int = MAX_BYTES) -> None:
        self._driver = driver
        self._limit = limit
        self.nbytes = 0
        self.ended: deque[MappedMemory] = deque()
        # By its address. Single operations on it are atomic.
        self._known: weakref.WeakValueDictionary[int, MappedMemory] = weakref.WeakValueDictionary()
        self._unlocking: threading.Thread | None = None
        # Guards the number of bytes, and whether memory is locked; held while the driver locks it.
        self._lock = free_in_child(UninterruptedLock())
        # Guards the thread that unlocks. I/O threads take it, and don't wait for the driver.
        self._starting = free_in_child(UninterruptedLock())

    def add(self, memory: MappedMemory) -> None:
        """Adds memory that may be locked."""
        self._known[memory.address] = memory

    def note_copy(self, address: int, nbytes: int, devices: Iterable[torch.device]) -> None:
        """Notes that bytes are about to be copied; locks the memory that they are in, if it pays.

        Args:
            address: the address of the first of them. If it isn't in memory that was added, nothing
                happens.
            nbytes: how many.
            devices: the devices that they are copied from or to. If none of them is one that memory
                can be locked for, nothing happens.
        """
        device = next((each for each in devices if each.type == _LOCKING), None)
        memory = self._find(address) if device is not None else None
        if device is None or memory is None or memory.locked_by is not None:
            return
        memory.copied += nbytes
        if memory.copied < COPIES * len(memory):
            return
        with self._lock:
            often = memory.copied >= COPIES * len(memory)  # unless another thread has unlocked it
            if not often or memory.locked_by or self.nbytes + len(memory) > self._limit:
                return
            if self._driver.lock(memory.address, len(memory), device):
                memory.locked_by = self
                if type(memory) is MappedMemory:
                    memory.__class__ = _LockedMemory
                self.nbytes += len(memory)
            else:
                memory.copied = float("-inf")

    def _find(self, address: int) -> MappedMemory | None:
        for each in self._known.valuerefs():
            if address >= each.key:
                memory = each()
                if memory is not None and address < each.key + len(memory):
                    return memory
        return None

    def unlock(self, memory: MappedMemory) -> None:
        """Unlocks memory for good, if it is locked, when the devices have no work left."""
        with self._lock:
            memory.copied = float("-inf")
        if memory.locked_by is None:
            return
        self._driver.unlock(memory.address)
        with self._lock:
            memory.locked_by = None
            self.nbytes -= len(memory)

    def unlock_ended(self, timeout: float = 0.0) -> None:
        """Begins to unlock what has ended.

        Args:
            timeout: how many seconds to wait until all of that is unlocked.
        """
        if not self.ended and self._unlocking is None:
            return
        with self._starting:
            thread = self._unlocking
            if thread is None:
                thread = self._unlocking = threading.Thread(
                    target=self._unlock_ended, name="zrpc-unlock", daemon=True
                )
                thread.start()
        if timeout:
            thread.join(timeout)

    def _unlock_ended(self) -> None:
        while True:
            while self.ended:
                self.unlock(self.ended.popleft())
            with self._starting:
                if not self.ended:
                    self._unlocking = None
                    return

    def forget(self) -> None:
        """Forgets all memory, since this process is a fork: CUDA can't be used in it."""
        for memory in [*self._known.values(), *self.ended]:
            memory.locked_by = None
        self.ended.clear()
        self._unlocking = None
        self.nbytes = 0


page_locks = PageLocks(CudaRuntime())
os.register_at_fork(after_in_child=page_locks.forget)

"""The descriptors that a thread of another process waits to read from, as the system shows them."""

from __future__ import annotations

import os
import platform
import select
import struct

# The numbers of the system calls that wait for input, by what their first two arguments are.
_READS = {"x86_64": {0}, "aarch64": {63}}
_POLLS = {"x86_64": {7, 271}, "aarch64": {73}}
_SELECTS = {"x86_64": {23, 270}, "aarch64": {72}}
_EPOLLS = {"x86_64": {232, 281, 441}, "aarch64": {22, 441}}
_POLLED = struct.Struct("=ihh")
_MAX_COUNT = 65536  # more are no sensible arguments


def awaited_descriptors(thread: str) -> list[int]:
    """Returns the descriptors that a thread waits for; none if it runs, or waits in another way.

    Args:
        thread: its directory in ``/proc``.

    Raises:
        OSError: it is gone, or another user's.
    """
    with open(f"{thread}/syscall") as file:
        call = file.read().split()  # its number and its arguments, or one word
    if len(call) < 3:
        return []
    machine, number = platform.machine(), int(call[0])
    first, second = int(call[1], 16), int(call[2], 16)
    if number in _READS.get(machine, ()):
        return [first]
    if number in _EPOLLS.get(machine, ()):
        with open(f"{thread}/fdinfo/{first}") as file:
            return [int(line.split()[1]) for line in file if line.startswith("tfd:")]
    if number in _POLLS.get(machine, ()) and second <= _MAX_COUNT:
        polled = _POLLED.iter_unpack(_memory(thread, first, second * _POLLED.size))
        return [fd for fd, events, _ in polled if events & select.POLLIN]
    if number in _SELECTS.get(machine, ()) and second and first <= _MAX_COUNT:
        bits = int.from_bytes(_memory(thread, second, (first + 63) // 64 * 8), "little")
        return [fd for fd in range(first) if bits >> fd & 1]
    return []


def _memory(thread: str, address: int, size: int) -> bytes:
    """Returns a piece of its memory; the right to read `syscall` is also that to read this."""
    with open(f"{thread}/mem", "rb", buffering=0) as file:
        data = os.pread(file.fileno(), size, address)
    return data if len(data) == size else b""

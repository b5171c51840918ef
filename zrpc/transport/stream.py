"""Messages one after the other in a stream of bytes. No I/O in here.

======== ======== =================================================================
bytes    type     field
======== ======== =================================================================
0-3      uint32   the size of the first frame
4-7      uint32   how many other frames there are
8-       uint32   the size of each of those
then     bytes    the frames
======== ======== =================================================================

The first message of a stream says whose it is: its first frame is the sender's identity.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from zrpc.errors import ProtocolError

__all__ = ["LARGEST_MESSAGE", "Unpacker", "header"]

# The most bytes of a message, all frames together.
LARGEST_MESSAGE = 1 << 20

_HEADER = struct.Struct("<II")
_SIZE = struct.Struct("<I")

_pack, _unpack_from = _HEADER.pack, _HEADER.unpack_from


def header(first: bytes, buffers: Sequence[Any] = ()) -> bytes:
    """What stands before the frames of a message in the stream."""
    if not buffers:
        return _pack(len(first), 0)
    sizes = [memoryview(buffer).nbytes for buffer in buffers]
    return _pack(len(first), len(sizes)) + struct.pack(f"<{len(sizes)}I", *sizes)


class Unpacker:
    """Finds the messages in a stream as it comes. For one thread at a time."""

    def __init__(self) -> None:
        self._rest = bytearray()  # the beginning of a message whose end has not come

    def feed(self, data: memoryview) -> list[tuple[bytes, Sequence[Any] | None]]:
        """Takes in the next bytes of the stream; keeps none of them.

        Returns:
            The messages that are complete, each as its first frame and the others, which are
            writable and memory of their own; None for these where there is no memory for them.

        Raises:
            ProtocolError: this is no such stream.
        """
        if self._rest:
            self._rest += data
            whole, self._rest = self._rest, bytearray()
            data = memoryview(whole)
        messages: list[tuple[bytes, Sequence[Any] | None]] = []
        start, end = 0, len(data)
        while end - start >= _HEADER.size:
            size, count = _unpack_from(data, start)
            at = start + _HEADER.size
            if not count:
                stop = at + size
                if stop > end:
                    _check(size)
                    break
                messages.append((bytes(data[at:stop]), ()))
            else:
                _check(size + _SIZE.size * count)
                at += _SIZE.size * count
                if at > end:
                    break
                sizes = struct.unpack_from(f"<{count}I", data, start + _HEADER.size)
                stop = at + size + sum(sizes)
                _check(stop - at)
                if stop > end:
                    break
                first = bytes(data[at : at + size])
                messages.append((first, _cut(data[at + size : stop], sizes)))
            start = stop
        if start < end:
            self._rest += data[start:]
        return messages


def _cut(data: memoryview, sizes: Sequence[int]) -> list[bytearray] | None:
    frames = []
    try:
        for size in sizes:
            frames.append(bytearray(data[:size]))
            data = data[size:]
    except MemoryError:
        return None
    return frames


def _check(size: int) -> None:
    if size > LARGEST_MESSAGE:
        raise ProtocolError(
            f"expected a message of at most {LARGEST_MESSAGE} bytes in a stream, found {size}"
        )

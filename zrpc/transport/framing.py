"""The framing of messages in a stream of bytes. No I/O in here.

======== ======== =================================================================
bytes    type     field
======== ======== =================================================================
0-3      uint32   the size of the first frame
4-7      uint32   the number of other frames
8-       uint32   the size of each of them
then     bytes    the frames
======== ======== =================================================================

The first frame of a stream's first message is the identity of the sender.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from zrpc.errors import ProtocolError

__all__ = ["MAX_MESSAGE_BYTES", "Unpacked", "Unpacker", "header", "pack_header"]

# The first frame and the others.
Unpacked = tuple[bytes, Sequence[Any]]

# The maximum of a message, all frames together.
MAX_MESSAGE_BYTES = 1 << 20

_HEADER = struct.Struct("<II")
_SIZE = struct.Struct("<I")

_HEADER_SIZE = _HEADER.size
# Packs the header of a message: the size of its first frame, and the number of others.
pack_header = _HEADER.pack
_unpack_from = _HEADER.unpack_from


def header(first: bytes, buffers: Sequence[Any] = ()) -> bytes:
    """Returns what precedes the frames of a message in the stream."""
    if not buffers:
        return pack_header(len(first), 0)
    sizes = [memoryview(buffer).nbytes for buffer in buffers]
    return pack_header(len(first), len(sizes)) + struct.pack(f"<{len(sizes)}I", *sizes)


class Unpacker:
    """Finds the messages in a stream as it arrives. For one thread at a time."""

    def __init__(self) -> None:
        self._rest = bytearray()  # the beginning of an incomplete message
        self._needed = 0  # the length of that before it is parsed again

    def feed(self, data: memoryview, messages: list[Unpacked]) -> None:
        """Adds the next bytes of the stream, which are copied.

        Args:
            data: the bytes.
            messages: gets the complete messages, each as its first frame and the others, which are
                writable and have memory of their own.

        Raises:
            ProtocolError: the bytes are not a stream of messages. Those before are in `messages`.
        """
        rest, end = self._rest, len(data)
        if not rest and end >= _HEADER_SIZE:  # the usual case: one message without other frames
            size, count = _unpack_from(data)
            if not count and end == _HEADER_SIZE + size:
                messages.append((bytes(data[_HEADER_SIZE:]), ()))
                return
        joined = bool(rest)
        if joined:
            rest += data
            if len(rest) < self._needed:
                return
            data = memoryview(rest)
        start, end = 0, len(data)
        self._needed = _HEADER_SIZE
        while end - start >= _HEADER_SIZE:
            size, count = _unpack_from(data, start)
            at = start + _HEADER_SIZE + _SIZE.size * count
            sizes: Sequence[int] = ()
            if count:
                _check_size(size + _SIZE.size * count)
                if at > end:
                    self._needed = at - start
                    break
                sizes = struct.unpack_from(f"<{count}I", data, start + _HEADER_SIZE)
            stop = at + size + sum(sizes)
            if stop > end:
                _check_size(stop - at)
                self._needed = stop - start
                break
            messages.append(_copy_frames(data, at, size, sizes))
            start = stop
        if joined:
            data.release()
            del rest[:start]
        elif start < end:
            rest += data[start:]


def _copy_frames(data: memoryview, at: int, size: int, sizes: Sequence[int]) -> Unpacked:
    """Copies the frames that begin at an offset."""
    first = bytes(data[at : at + size])
    others: list[bytearray] = []
    for each in sizes:
        at += size
        size = each
        others.append(bytearray(data[at : at + size]))
    return first, others


def _check_size(size: int) -> None:
    if size > MAX_MESSAGE_BYTES:
        raise ProtocolError(
            f"expected a message of at most {MAX_MESSAGE_BYTES} bytes in a stream, found {size}"
        )

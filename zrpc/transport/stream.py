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
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from zrpc.errors import ProtocolError

__all__ = ["LARGEST_MESSAGE", "Unpacked", "Unpacker", "header"]

# The first frame and the others, or None for what there is no memory for; of the first, there may
# be the beginning then.
Unpacked = tuple[bytes | None, Sequence[Any] | None]

# The most bytes of a message, all frames together.
LARGEST_MESSAGE = 1 << 20

_HEADER = struct.Struct("<II")
_SIZE = struct.Struct("<I")

# So much of a message that there is no memory for is looked at: its header, and whose it is.
_BEGINNING = 4096
# Of the first frame of such a message, so much is kept at most.
_HEAD = 64

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
        self._needed = 0  # how long that must be before it is worth another look
        self._skip = 0  # how much is still to come of a message that there is no memory for

    def feed(self, data: memoryview) -> Iterator[Unpacked]:
        """Takes in the next bytes of the stream; keeps none of them. To be read to its end.

        Yields:
            The messages that are complete, each as its first frame and the others, which are
            writable and memory of their own; None for what there is no memory for.

        Raises:
            ProtocolError: this is no such stream.
            MemoryError: there is none, and it can't be told where a message ends: with it the
                stream does.
        """
        if self._skip:
            skipped = min(self._skip, len(data))
            self._skip -= skipped
            data = data[skipped:]
        if not self._rest:
            start = yield from self._cut_off(data)
            try:
                self._rest += data[start:]
            except MemoryError:
                yield self._lose(data[start:], len(data) - start)
            return
        try:
            self._rest += data
        except MemoryError:
            begun = (bytes(self._rest[:_BEGINNING]) + bytes(data[:_BEGINNING]))[:_BEGINNING]
            lost = self._lose(memoryview(begun), len(self._rest))
            self._rest = bytearray()
            yield lost
            yield from self.feed(data)
            return
        if len(self._rest) >= self._needed:
            with memoryview(self._rest) as whole:
                start = yield from self._cut_off(whole)
            del self._rest[:start]

    def _lose(self, begun: memoryview, size: int) -> Unpacked:
        """There is no memory for a message that has begun to come: the rest of it is skipped.

        Args:
            begun: the beginning of it, or more.
            size: how many bytes of it have come and are not to be skipped.
        """
        if len(begun) < _HEADER.size:
            raise MemoryError
        first, count = _unpack_from(begun)
        at = _HEADER.size + _SIZE.size * count
        if at > len(begun):
            raise MemoryError
        total = first + sum(struct.unpack_from(f"<{count}I", begun, _HEADER.size))
        _check(total)
        self._skip = at + total - size
        return bytes(begun[at : at + min(first, _HEAD)]) or None, None

    def _cut_off(self, data: memoryview) -> Generator[Unpacked, None, int]:
        """Yields the complete messages; returns where they end."""
        start, end = 0, len(data)
        self._needed = _HEADER.size
        while end - start >= _HEADER.size:
            size, count = _unpack_from(data, start)
            at = start + _HEADER.size
            sizes: Sequence[int] = ()
            stop = at + size
            if count:
                _check(size + _SIZE.size * count)
                at += _SIZE.size * count
                if at > end:
                    self._needed = at - start
                    break
                sizes = struct.unpack_from(f"<{count}I", data, start + _HEADER.size)
                stop = at + size + sum(sizes)
            if stop > end:
                _check(stop - at)
                self._needed = stop - start
                break
            yield _frames(data, at, size, sizes)
            start = stop
        return start


def _frames(data: memoryview, at: int, size: int, sizes: Sequence[int]) -> Unpacked:
    """The frames that begin at a place, copied."""
    first: bytes | None = None
    try:
        first = bytes(data[at : at + size])
        if not sizes:
            return first, ()
        others = []
        for each in sizes:
            at += size
            size = each
            others.append(bytearray(data[at : at + size]))
    except MemoryError:
        return first, None
    return first, others


def _check(size: int) -> None:
    if size > LARGEST_MESSAGE:
        raise ProtocolError(
            f"expected a message of at most {LARGEST_MESSAGE} bytes in a stream, found {size}"
        )

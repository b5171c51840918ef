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
from zrpc.transport.chunks import HEAD_BYTES, remnant

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
    sizes = [memoryview(buffer).nbytes for buffer in buffers]
    return pack_header(len(first), len(sizes)) + struct.pack(f"<{len(sizes)}I", *sizes)


class Unpacker:
    """Finds the messages in a stream as it arrives. For one thread at a time.

    A message for which there is no memory is dropped, except for its beginning, which says who
    waits for it.
    """

    def __init__(self) -> None:
        self._rest = bytearray()  # the beginning of an incomplete message
        self._needed = 0  # the length of that before it is parsed again
        self._missing = 0  # if that message is dropped: how many of its bytes have not come

    def feed(self, data: memoryview, messages: list[Unpacked]) -> None:
        """Adds the next bytes of the stream, which are copied.

        Args:
            data: the bytes.
            messages: gets the complete messages, each as its first frame and the others, which are
                writable and have memory of their own; of one that is dropped, the `remnant`.

        Raises:
            ProtocolError: the bytes are not a stream of messages, or there is no memory even for
                the beginning of one. Those before are in `messages`.
        """
        rest, start = self._rest, 0
        begun = len(rest)
        try:
            end = len(data)
            if not rest and end >= _HEADER_SIZE:  # the usual case: one message, without others
                size, count = _unpack_from(data)
                if not count and end == _HEADER_SIZE + size:
                    messages.append((bytes(data[_HEADER_SIZE:]), ()))
                    return
            if begun:
                if self._missing:
                    self._drop(data, messages)
                    return
                rest += data
                if len(rest) < self._needed:
                    return
                data = memoryview(rest)
            end = len(data)
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
            if begun:
                data.release()
                del rest[:start]
            elif start < end:
                rest += data[start:]
        except (MemoryError, RecursionError) as error:
            try:
                joined = len(rest) > begun
                self._begin_drop((memoryview(rest) if joined else data)[start:], joined, messages)
            except (MemoryError, RecursionError):
                raise ProtocolError("there is no memory for the beginning of a message") from error

    def _begin_drop(self, data: memoryview, joined: bool, messages: list[Unpacked]) -> None:
        """Drops the next message, for lack of memory.

        Copies only what says how long it is, and who waits for it.

        Args:
            data: the bytes that are not in the rest, which come next.
            joined: whether all of them are in it: then they take its place.
            messages: as in `feed`.
        """
        if self._missing:
            raise MemoryError
        rest = self._rest = bytearray() if joined else self._rest
        begun = len(rest)
        end = begun + len(data)
        rest += data[: max(0, _HEADER_SIZE - begun)]
        self._needed = _HEADER_SIZE
        if end < self._needed:
            return
        size, count = _unpack_from(rest)
        at = _HEADER_SIZE + _SIZE.size * count
        _check_size(at - _HEADER_SIZE)
        rest += data[len(rest) - begun : max(0, at + HEAD_BYTES - begun)]
        self._needed = at
        if end < self._needed:
            return
        del rest[at + HEAD_BYTES :]
        sizes = _SIZE.iter_unpack(memoryview(rest)[_HEADER_SIZE:at])
        stop = at + size + sum(each for (each,) in sizes)
        _check_size(stop - at)
        self._needed = min(stop, at + HEAD_BYTES)
        if end >= self._needed:
            self._missing = stop - begun
            self._drop(data, messages)

    def _drop(self, data: memoryview, messages: list[Unpacked]) -> None:
        """Passes over the next bytes of a message that is dropped."""
        if len(data) < self._missing:
            self._missing -= len(data)
            return
        size, count = _unpack_from(self._rest)
        at = _HEADER_SIZE + _SIZE.size * count
        messages.append((remnant(self._rest[at : at + min(size, HEAD_BYTES)]), ()))
        self._rest, following, self._missing = bytearray(), data[self._missing :], 0
        self.feed(following, messages)


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

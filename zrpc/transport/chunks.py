"""Large messages in chunks, each a ZeroMQ message of its own.

An inbox that listens on tcp accepts no frame above ``LARGEST_FRAME`` (ZMQ_MAXMSGSIZE): ZeroMQ holds
a frame in memory until all of it is there, and does so also before it knows whose it is. So a
stranger's connection holds a megabyte at most. And it hands no message on before its last frame is
there, so that a large one would be copied, sent, and copied again, each from beginning to end.
In chunks, one is copied while another travels.

The first frame of a chunk is a header, as below; the others hold the bytes of the message's frames,
one after the other, cut where a chunk ends.

======== ======== =================================================================
bytes    type     field
======== ======== =================================================================
0        uint8    0: no version of the layout of messages, see ``zrpc.wire.header``
1-3               reserved, 0
4-7      uint32   the number of the chunk, from 0
8-15     uint64   the sender's number of the message
16-      uint64   in chunk 0 only: the size of each of the message's frames, in bytes
======== ======== =================================================================

The chunks of a message come in order, with nothing between them from the same mailbox. Should the
connection break in between, the rest is dropped.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import struct
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from zrpc.errors import ProtocolError

__all__ = ["CHUNK", "LARGEST_FRAME", "Assembler", "NoMemory", "chunks", "is_chunk"]

# The most bytes of a message in one chunk.
CHUNK = 2**20 - 1024
# What CURVE adds, and more.
LARGEST_FRAME = CHUNK + 512

_HEADER = struct.Struct("<BxxxIQ")
_SIZE = struct.Struct("<Q")

# From this size on, in bytes, malloc takes fresh pages from the system each time. Their first use
# takes ten times as long as the copy to them, with huge pages no longer than it.
_HUGE_FROM = 2**25

_new_bytearray = ctypes.pythonapi.PyByteArray_FromStringAndSize
_new_bytearray.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t]
_new_bytearray.restype = ctypes.py_object


class NoMemory(ProtocolError):
    """There is no memory for a frame of a message, which is lost.

    Attributes:
        first: the beginning of its first frame.
    """

    def __init__(self, size: int, reason: Exception) -> None:
        super().__init__(f"there is no memory for a frame of {size} bytes: {reason}")
        self.first = memoryview(b"")


def chunks(number: int, frames: Sequence[Any]) -> Iterator[list[Any]]:
    """A message in chunks, each a list of frames; nothing is copied.

    Args:
        number: that of the message.
        frames: the message's, anything with the buffer interface.
    """
    views = [memoryview(frame).cast("B") for frame in frames]
    sizes = b"".join(_SIZE.pack(len(view)) for view in views)
    index = 0
    chunk, room = [_HEADER.pack(0, 0, number) + sizes], CHUNK
    for view in views:
        while len(view):
            if not room:
                yield chunk
                index += 1
                chunk, room = [_HEADER.pack(0, index, number)], CHUNK
            chunk.append(view[:room])  # type: ignore[arg-type]
            view, room = view[room:], room - len(chunk[-1])
    yield chunk


def is_chunk(first: bytes) -> bool:
    """Whether a message that came, with this first frame, is a chunk of a larger one."""
    return first[:1] == b"\0"


class Assembler:
    """Puts messages together again; those of several senders at once. For one thread at a time."""

    def __init__(self) -> None:
        self._unfinished: dict[Hashable, _Unfinished] = {}
        # The number of the message that there was no memory for, of which more may come.
        self._lost: dict[Hashable, int] = {}

    @property
    def busy(self) -> bool:
        """Whether a message has begun to come, and its end has not."""
        return bool(self._unfinished)

    def add(
        self, sender: Hashable, header: bytes, frames: Sequence[Any]
    ) -> tuple[Any, list[Any]] | None:
        """Takes in one chunk.

        Returns:
            The first frame of the message and the others, once it is complete.

        Raises:
            ProtocolError: the chunk does not go on with what has come of this sender. What has is
                dropped.
            NoMemory: there is none for the message. The rest of it is ignored.
        """
        unfinished = self._unfinished.pop(sender, None)
        if len(header) < _HEADER.size:
            raise ProtocolError(f"expected the header of a chunk, found {len(header)} bytes")
        _, index, number = _HEADER.unpack_from(header)
        if self.ignores(sender, header):
            return None
        self._lost.pop(sender, None)
        if index == 0:
            unfinished = _Unfinished(number, _sizes(header))
        elif unfinished is None or unfinished.expects != (number, index):
            expected = "the first of a message" if unfinished is None else unfinished.expects
            raise ProtocolError(
                f"expected chunk {expected}, found {(number, index)}: a connection broke "
                "while a large message was on its way, which is lost"
            )
        try:
            for frame in frames:
                unfinished.add(frame)
        except NoMemory as error:
            error.first = memoryview(unfinished.frames[0] if unfinished.frames else frame)
            self._lost[sender] = number
            raise
        unfinished.expects = (number, index + 1)
        if unfinished.complete:
            return unfinished.frames[0], unfinished.frames[1:]
        self._unfinished[sender] = unfinished
        return None

    def forget(self, sender: Hashable) -> None:
        """Drops what is unfinished of a sender, who is gone."""
        self._unfinished.pop(sender, None)
        self._lost.pop(sender, None)

    def ignores(self, sender: Hashable, header: bytes) -> bool:
        """Whether this chunk belongs to a message that is lost for lack of memory."""
        _, index, number = _HEADER.unpack_from(header)
        return bool(index) and self._lost.get(sender) == number

    def lose(self, sender: Hashable, header: bytes) -> memoryview | None:
        """There is no memory for a chunk; its message is lost, and the rest of it ignored.

        Returns:
            The beginning of the message's first frame; None where that has not come.
        """
        _, index, number = _HEADER.unpack_from(header)
        unfinished = self._unfinished.pop(sender, None)
        self._lost[sender] = number
        if unfinished is None or unfinished.expects != (number, index) or not unfinished.frames:
            return None
        return memoryview(unfinished.frames[0])


class _Unfinished:
    """A message of which the first chunks have come.

    Attributes:
        expects: the numbers of the message and of the next chunk.
        frames: those that are complete.
    """

    def __init__(self, number: int, sizes: Sequence[int]) -> None:
        self.expects = (number, 0)
        self.frames: list[Any] = []
        self._sizes = sizes
        # The present frame: so much of it is there, in memory of its own where it comes in parts.
        self._filled = 0
        self._memory: memoryview | None = None
        self._begin_frame()

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return len(self.frames) == len(self._sizes)

    def add(self, frame: Any) -> None:
        """Takes in a part of the present frame."""
        if self.complete or self._filled + len(frame) > self._sizes[len(self.frames)]:
            raise ProtocolError("found a chunk with more bytes than its message has")
        start, self._filled = self._filled, self._filled + len(frame)
        size = self._sizes[len(self.frames)]
        if len(frame) < size:
            # Not all at the end: it would be late by the time that takes.
            if self._memory is None:
                self._memory = memoryview((_huge if size >= _HUGE_FROM else _uninitialized)(size))
            self._memory[start : self._filled] = memoryview(frame)
        if self._filled == size:
            self.frames.append(frame if self._memory is None else self._memory.obj)
            self._begin_frame()

    def _begin_frame(self) -> None:
        """Prepares for the next frame that has any bytes."""
        while not self.complete and not self._sizes[len(self.frames)]:
            self.frames.append(b"")
        self._filled, self._memory = 0, None


def _sizes(header: bytes) -> list[int]:
    sizes = header[_HEADER.size :]
    if not sizes or len(sizes) % _SIZE.size:
        raise ProtocolError(f"expected the sizes of frames, found {len(sizes)} bytes")
    return [size for (size,) in _SIZE.iter_unpack(sizes)]


def _uninitialized(size: int) -> bytearray:
    """Memory that malloc may have had in use before, without the zeros of ``bytearray(size)``."""
    try:
        memory: bytearray = _new_bytearray(None, size)
    except (MemoryError, SystemError) as error:
        raise NoMemory(size, error) from error
    return memory


def _huge(size: int) -> mmap.mmap | bytearray:
    """Memory with huge pages, where the system has them."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return _uninitialized(size)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise NoMemory(size, error) from error
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory

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
16-47    bytes    the first 32 bytes of the message's first frame
48-      uint64   in chunk 0 only: the size of each of the message's frames, in bytes
======== ======== =================================================================

The chunks of a message come in order, with nothing between them from the same mailbox. Should the
connection break in between, some are lost. ZeroMQ makes another connection, by which the others
come, perhaps before those of the old one that are still to be read. Then the whole message is lost;
the beginning of its first frame, which each chunk repeats, says who is to be told.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from zrpc.errors import ProtocolError
from zrpc.malloc import uninitialized

__all__ = [
    "CHUNK",
    "LARGEST_FRAME",
    "Assembler",
    "NoMemory",
    "broken_off",
    "chunks",
    "is_chunk",
]

# The most bytes of a message in one chunk.
CHUNK = 2**20 - 1024
# What CURVE adds, and more.
LARGEST_FRAME = CHUNK + 512

_HEADER = struct.Struct("<BxxxIQ32s")
_SIZE = struct.Struct("<Q")
# In place of the number of a chunk: the rest of the message does not come.
_BROKEN_OFF = 2**32 - 1

# So many messages that were lost are remembered of each sender, the latest: more of them may come.
_LOST_REMEMBERED = 16

# From this size on, in bytes, malloc takes fresh pages from the system each time. Their first use
# takes ten times as long as the copy to them, with huge pages no longer than it.
_HUGE_FROM = 2**25


class NoMemory(ProtocolError):
    """There is no memory for a frame of a message, which is lost.

    Attributes:
        head: the beginning of its first frame.
    """

    def __init__(self, size: int, reason: Exception) -> None:
        super().__init__(f"there is no memory for a frame of {size} bytes: {reason}")
        self.head = b""


def chunks(number: int, frames: Sequence[Any]) -> Iterator[list[Any]]:
    """A message in chunks, each a list of frames; nothing is copied.

    Args:
        number: that of the message.
        frames: the message's, anything with the buffer interface.
    """
    views = [memoryview(frame).cast("B") for frame in frames]
    sizes = b"".join(_SIZE.pack(len(view)) for view in views)
    head = bytes(views[0][:32])
    index = 0
    chunk, room = [_HEADER.pack(0, 0, number, head) + sizes], CHUNK
    for view in views:
        while len(view):
            if not room:
                yield chunk
                index += 1
                chunk, room = [_HEADER.pack(0, index, number, head)], CHUNK
            chunk.append(view[:room])  # type: ignore[arg-type]
            view, room = view[room:], room - len(chunk[-1])
    yield chunk


def broken_off(number: int, first: Any) -> bytes:
    """The only frame of a chunk that says that the rest of a message does not come.

    Args:
        number: that of the message.
        first: its first frame.
    """
    return _HEADER.pack(0, _BROKEN_OFF, number, bytes(first[:32]))


def is_chunk(first: bytes | memoryview) -> bool:
    """Whether a message that came, with this first frame, is a chunk of a larger one."""
    return first[:1] == b"\0"


class Assembler:
    """Puts messages together again; those of several senders at once. For one thread at a time.

    Args:
        on_lost: called once for each message of which not all comes, with the sender and the
            beginning of the message's first frame.
    """

    def __init__(self, on_lost: Callable[[Any, bytes], None]) -> None:
        self._on_lost = on_lost
        self._unfinished: dict[Hashable, _Unfinished] = {}
        # The numbers of messages that are lost, of which more may come.
        self._lost: dict[Hashable, deque[int]] = {}

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
            ProtocolError: it is none. What has come of this sender is dropped.
            NoMemory: there is none for the message. The rest of it is ignored.
        """
        index, number, head = _read(header)
        if number in self._lost.get(sender, ()):
            return None
        unfinished = self._unfinished.pop(sender, None)
        if unfinished is not None and unfinished.expects != (number, index):
            self._lose(sender, unfinished.number, unfinished.head)
            if unfinished.number == number:
                return None
            unfinished = None
        if unfinished is None:
            if index:
                self._lose(sender, number, head)
                return None
            unfinished = _Unfinished(number, head, _sizes(header))
        try:
            for frame in frames:
                unfinished.add(frame)
        except NoMemory as error:
            error.head = head
            self._forbid(sender, number)
            raise
        unfinished.next += 1
        if unfinished.complete:
            return unfinished.frames[0], unfinished.frames[1:]
        self._unfinished[sender] = unfinished
        return None

    def forget(self, sender: Hashable) -> None:
        """Drops what is unfinished of a sender, who is gone."""
        self._unfinished.pop(sender, None)
        self._lost.pop(sender, None)

    def break_off(self, sender: Hashable) -> None:
        """The sender has sent something else: what is unfinished of it is lost."""
        unfinished = self._unfinished.pop(sender, None)
        if unfinished is not None:
            self._lose(sender, unfinished.number, unfinished.head)

    def lose(self, sender: Hashable, header: bytes | memoryview) -> bytes | None:
        """There is no memory for a chunk; its message is lost, and the rest of it ignored.

        Returns:
            The beginning of the message's first frame; None where it is known to be lost.

        Raises:
            ProtocolError: it is no chunk.
        """
        _, number, head = _read(header)
        if number in self._lost.get(sender, ()):
            return None
        self._forbid(sender, number)
        unfinished = self._unfinished.get(sender)
        if unfinished is not None and unfinished.number == number:
            del self._unfinished[sender]
        return head

    def _lose(self, sender: Hashable, number: int, head: bytes) -> None:
        self._forbid(sender, number)
        self._on_lost(sender, head)

    def _forbid(self, sender: Hashable, number: int) -> None:
        """More of a message is ignored."""
        self._lost.setdefault(sender, deque(maxlen=_LOST_REMEMBERED)).append(number)


def _read(header: bytes | memoryview) -> tuple[int, int, bytes]:
    """The numbers of a chunk and of its message, and the beginning of that."""
    if len(header) < _HEADER.size:
        raise ProtocolError(f"expected the header of a chunk, found {len(header)} bytes")
    _, index, number, head = _HEADER.unpack_from(header)
    return index, number, head


class _Unfinished:
    """A message of which the first chunks have come.

    Attributes:
        number: the sender's number of the message.
        head: the beginning of its first frame.
        next: the number of the next chunk.
        frames: those that are complete.
    """

    def __init__(self, number: int, head: bytes, sizes: Sequence[int]) -> None:
        self.number = number
        self.head = head
        self.next = 0
        self.frames: list[Any] = []
        self._sizes = sizes
        # The present frame: so much of it is there, in memory of its own where it comes in parts.
        self._filled = 0
        self._memory: memoryview | None = None
        self._begin_frame()

    @property
    def expects(self) -> tuple[int, int]:
        """The numbers of the message and of the next chunk."""
        return self.number, self.next

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
    try:
        return uninitialized(size)
    except (MemoryError, SystemError) as error:
        raise NoMemory(size, error) from error


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

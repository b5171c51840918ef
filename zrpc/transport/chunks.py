"""Large messages in chunks; each chunk is a ZeroMQ message of its own.

An inbox that listens on tcp accepts no frame above ``MAX_FRAME_BYTES`` (ZMQ_MAXMSGSIZE). ZeroMQ
holds a frame in memory until all of it has arrived, even before it knows who sends it. So a
stranger's connection can make it hold a megabyte at most. ZeroMQ also delivers no message before
its last frame has arrived, so a large one would be copied, sent and copied again, each as a whole.
With chunks, one is copied while another is in flight.

The first frame of a chunk is a header, as below. The others hold the bytes of the message's frames,
one after the other, cut where a chunk ends.

======== ======== =================================================================
bytes    type     field
======== ======== =================================================================
0        uint8    0, which is not a version of the layout of messages
1-3               reserved, 0
4-7      uint32   the number of the chunk, from 0
8-15     uint64   the sender's number of the message
16-47    bytes    the first 32 bytes of the message's first frame
48-      uint64   in chunk 0 only: the size of each of the message's frames, in bytes
======== ======== =================================================================

The chunks of a message arrive in order, with nothing between them from the same mailbox. If the
connection breaks, some are lost. ZeroMQ opens another connection for the others, which may arrive
before unread ones of the old connection. Then the whole message is lost. Each chunk repeats the
beginning of the message's first frame, which says who waits for it.

The receiving end of a direct connection leaves the header of a chunk in place of a message for
which there was no memory, in chunks or not: a *remnant*.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from zrpc.errors import ProtocolError
from zrpc.runtime.allocator import uninitialized

# The first byte of a chunk; no message begins with it.
BEGINS_CHUNK = b"\0"
# The maximum of a message's bytes in one chunk.
CHUNK_BYTES = 2**20 - 1024
# More than what CURVE adds.
MAX_FRAME_BYTES = CHUNK_BYTES + 512

# How much a chunk repeats of the message's first frame.
HEAD_BYTES = 32

_HEADER = struct.Struct(f"<BxxxIQ{HEAD_BYTES}s")
_SIZE = struct.Struct("<Q")
# In place of the number of a chunk: the rest of the message won't be sent.
_ABORTED = 2**32 - 1
# There was no memory for the message.
_UNREAD = 2**32 - 2

# For each sender, the number of lost messages that are remembered, since more chunks may arrive.
_MAX_LOST_PER_SENDER = 16

# From this size on, malloc takes fresh pages from the system each time. Their first use takes ten
# times as long as the copy to them; with huge pages it takes no longer than the copy.
_HUGE_PAGES_FROM_BYTES = 2**25


def chunks(number: int, frames: Sequence[Any]) -> Iterator[list[Any]]:
    """Cuts a message into chunks, each a list of frames, without copies.

    Args:
        number: the sender's number of the message.
        frames: the message's frames, anything with the buffer interface.
    """
    views = [memoryview(frame).cast("B") for frame in frames]
    sizes = b"".join(_SIZE.pack(len(view)) for view in views)
    head = bytes(views[0][:HEAD_BYTES])
    index = 0
    chunk, room = [_HEADER.pack(0, 0, number, head) + sizes], CHUNK_BYTES
    for view in views:
        while len(view):
            if not room:
                yield chunk
                index += 1
                chunk, room = [_HEADER.pack(0, index, number, head)], CHUNK_BYTES
            chunk.append(view[:room])  # type: ignore[arg-type]
            view, room = view[room:], room - len(chunk[-1])
    yield chunk


def abort_chunk(number: int, first: Any) -> bytes:
    """Returns the only frame of a chunk that says that the rest of a message won't be sent.

    Args:
        number: the sender's number of the message.
        first: the message's first frame.
    """
    return _HEADER.pack(0, _ABORTED, number, bytes(first[:HEAD_BYTES]))


def remnant(first: Any) -> bytes:
    """Returns what is left of a message for which there was no memory.

    Args:
        first: the message's first frame, or the beginning of it.
    """
    return _HEADER.pack(0, _UNREAD, 0, bytes(first[:HEAD_BYTES]))


def head_of_remnant(first: bytes) -> bytes | None:
    """Returns the beginning of the message that a `remnant` is of; None if it isn't one."""
    if len(first) != _HEADER.size:
        return None
    _, index, _, head = _HEADER.unpack(first)
    return head if index == _UNREAD else None


class Assembler:
    """Reassembles the messages of several senders. For one thread at a time.

    Args:
        on_lost: called once for each message that does not arrive completely, with the sender and
            the beginning of the message's first frame.

    Attributes:
        unfinished: the messages that have arrived in part, by sender.
    """

    def __init__(self, on_lost: Callable[[Any, bytes], None]) -> None:
        self._on_lost = on_lost
        self.unfinished: dict[Hashable, _Unfinished] = {}
        # The numbers of lost messages; more of their chunks may arrive.
        self._lost: dict[Hashable, deque[int]] = {}

    def add(
        self, sender: Hashable, header: bytes, frames: Sequence[Any]
    ) -> tuple[Any, list[Any]] | None:
        """Adds one chunk.

        Returns:
            The first frame of the message and the others if it is now complete, otherwise None.

        Raises:
            ProtocolError: it is not a chunk, or there is no memory for the message. This sender's
                unfinished message is lost.
        """
        if len(header) < _HEADER.size:
            raise ProtocolError(f"expected the header of a chunk, found {len(header)} bytes")
        _, index, number, head = _HEADER.unpack_from(header)
        if number in self._lost.get(sender, ()):
            return None
        unfinished = self.unfinished.pop(sender, None)
        if unfinished is not None and (unfinished.number, unfinished.next) != (number, index):
            self._report_lost(sender, unfinished.number, unfinished.head)
            if unfinished.number == number:
                return None
            unfinished = None
        if unfinished is None:
            if index:
                self._report_lost(sender, number, head)
                return None
            unfinished = _Unfinished(number, head, _parse_sizes(header))
        try:
            for frame in frames:
                unfinished.add(frame)
        except ProtocolError:
            self._report_lost(sender, number, head)
            raise
        unfinished.next += 1
        if unfinished.complete:
            return unfinished.frames[0], unfinished.frames[1:]
        self.unfinished[sender] = unfinished
        return None

    def forget(self, sender: Hashable) -> None:
        """Drops the unfinished message of a sender that no longer exists."""
        self.unfinished.pop(sender, None)
        self._lost.pop(sender, None)

    def break_off(self, sender: Hashable) -> None:
        """Reports the sender's unfinished message as lost, since it has sent something else."""
        unfinished = self.unfinished.pop(sender, None)
        if unfinished is not None:
            self._report_lost(sender, unfinished.number, unfinished.head)

    def _report_lost(self, sender: Hashable, number: int, head: bytes) -> None:
        self._lost.setdefault(sender, deque(maxlen=_MAX_LOST_PER_SENDER)).append(number)
        self._on_lost(sender, head)


class _Unfinished:
    """A message that has arrived in part.

    Attributes:
        number: the sender's number of the message.
        head: the beginning of its first frame.
        next: the number of the next chunk.
        frames: its complete frames.
    """

    def __init__(self, number: int, head: bytes, sizes: Sequence[int]) -> None:
        self.number = number
        self.head = head
        self.next = 0
        self.frames: list[Any] = []
        self._sizes = sizes
        # Of the current frame: the bytes that have arrived, and its memory if it has several parts.
        self._filled = 0
        self._memory: memoryview | None = None
        self._begin_frame()

    @property
    def complete(self) -> bool:
        """Whether all frames are complete."""
        return len(self.frames) == len(self._sizes)

    def add(self, frame: Any) -> None:
        """Adds a part of the current frame."""
        if self.complete or self._filled + len(frame) > self._sizes[len(self.frames)]:
            raise ProtocolError("found a chunk with more bytes than its message has")
        start, self._filled = self._filled, self._filled + len(frame)
        size = self._sizes[len(self.frames)]
        if len(frame) < size:
            # Copied at once: copying all parts at the end would delay the message.
            if self._memory is None:
                self._memory = memoryview(_allocate(size))
            self._memory[start : self._filled] = memoryview(frame)
        if self._filled == size:
            self.frames.append(frame if self._memory is None else self._memory.obj)
            self._begin_frame()

    def _begin_frame(self) -> None:
        """Skips empty frames, and prepares for the next one."""
        while not self.complete and not self._sizes[len(self.frames)]:
            self.frames.append(b"")
        self._filled, self._memory = 0, None


def _parse_sizes(header: bytes) -> list[int]:
    sizes = header[_HEADER.size :]
    if not sizes or len(sizes) % _SIZE.size:
        raise ProtocolError(f"expected the sizes of frames, found {len(sizes)} bytes")
    return [size for (size,) in _SIZE.iter_unpack(sizes)]


def _allocate(size: int) -> mmap.mmap | bytearray:
    """Returns memory for a frame, with huge pages for a large one if the system has them."""
    try:
        if size < _HUGE_PAGES_FROM_BYTES:
            return uninitialized(size)
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (MemoryError, SystemError, OSError, OverflowError, ValueError) as error:
        # A size that nobody has sent, or a limit of this process.
        raise ProtocolError(f"there is no memory for a frame of {size} bytes: {error}") from error
    with contextlib.suppress(OSError):  # this kernel has none
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory

"""The receiver's side of shared memory: segments of peers, mapped while they are in use."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

from zrpc.errors import ProtocolError
from zrpc.services.shm.segments import MAX_SEGMENTS, Place
from zrpc.wire.member_id import MemberId
from zrpc.wire.page_locks import MappedMemory, page_locks

# The maximum of one owner, each with a descriptor. It has fewer segments at a time, and the last
# may have come before it is heard that earlier ones are closed.
MAX_KNOWN = 2 * MAX_SEGMENTS


class SegmentMap(MappedMemory):
    """A mapped segment, with the descriptor that it was mapped from; without one if private.

    Python maps a file only if it may keep a second descriptor of it, and a program may keep many
    tensors. So this reserves addresses, which takes no memory, and maps the segment there.
    """

    fd = -1

    @classmethod
    def of(cls, fd: int, size: int, flags: int) -> SegmentMap:
        """Maps a segment.

        Raises:
            OSError: it can't be mapped.
        """
        memory = cls(-1, size, _RESERVED)
        _map_over(memory, fd, flags)
        return memory

    def private(self) -> SegmentMap:
        """Maps the segment again, for a message whose segment other workers read as well.

        What is written to the new mapping is seen by this process only.

        Raises:
            OSError: it can't be mapped.
        """
        return SegmentMap.of(self.fd, len(self), mmap.MAP_PRIVATE)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.end()


@dataclass(eq=False)
class Loan:
    """A segment that is lent to this worker for one message.

    Attributes:
        owner: the worker that owns the segment.
        number: the number of the segment among the owner's.
        memory: the mapping. Weak: the views keep it, and a loan of a closed agent should not.
        whole: what the buffers of the message are views of.
        keep: whether the segment must not be used again, since a fork of this process may read it.
    """

    owner: MemberId
    number: int
    memory: weakref.ref[SegmentMap]
    whole: weakref.ref[Any]
    keep: bool = False


class Loans:
    """All that is lent to one worker. For one thread at a time, except for `ended`.

    Attributes:
        ended: the weak references to what was lent, when all views of it have been freed.
        open: loans that have not ended, by the identity of these weak references.
    """

    def __init__(self) -> None:
        self.ended: deque[weakref.ref[Any]] = deque()
        # The segments of each owner by number, in the order in which they came; or why one can't be
        # mapped.
        self._known: dict[MemberId, dict[int, SegmentMap | Exception]] = {}
        self.open: dict[int, Loan] = {}

    def add(self, owner: MemberId, number: int, fd: int) -> None:
        """Maps a segment, for the messages that will name it.

        Args:
            owner: the worker that it comes from.
            number: its number among the owner's.
            fd: its descriptor, or `NO_DESCRIPTOR`. The loans own it from now on.
        """
        known = self._known.setdefault(owner, {})
        if len(known) >= MAX_KNOWN:
            del known[next(iter(known))]
        try:
            known[number] = _map(fd)
        except (OSError, ValueError, ProtocolError) as error:
            known[number] = error.with_traceback(None)

    def knows(self, owner: MemberId, number: int) -> bool:
        """Returns whether the descriptor of a segment has come."""
        return number in self._known.get(owner, ())

    def borrow(
        self, owner: MemberId, number: int, places: list[Place], private: bool = False
    ) -> list[Any]:
        """Lends this worker a segment that a message came in.

        Args:
            owner: the sender.
            number: the number of the segment among the owner's.
            places: offset and size of each buffer of the message.
            private: whether other workers read the segment at the same time.

        Returns:
            A view for each buffer. The message's tensors refer to them; when the last is freed the
            loan has ended.

        Raises:
            OSError: it can't be mapped.
            ProtocolError: it is not what a segment must be, or has no such places.
        """
        memory = self._known.get(owner, {}).get(number)
        if memory is None:
            raise ProtocolError(f"expected the descriptor of segment {number}, found none")
        if isinstance(memory, Exception):
            raise type(memory)(*memory.args)  # the same object would collect tracebacks
        room = len(memory)
        if any(offset + size > room for offset, size in places):
            del memory  # a log record that is kept would keep it mapped, by this frame
            raise ProtocolError(f"expected places within {room} bytes, found {places}")
        if private:
            memory = memory.private()
        # Arrays of ctypes and not memoryviews: whatever is made from an array's buffer refers to
        # the array; made from a memoryview, it may refer to the object below. So the views keep the
        # array of all, and it is freed with the last one.
        whole = (ctypes.c_char * room).from_buffer(memory)
        # That may be in any thread, at any moment. It is only recorded, by a C function, which no
        # signal handler interrupts (what that raised would be lost).
        watched = weakref.ref(whole, self.ended.append)
        self.open[id(watched)] = Loan(owner, number, weakref.ref(memory), watched)
        return [(ctypes.c_char * size).from_buffer(whole, offset) for offset, size in places]

    def has(self, owner: MemberId, number: int) -> bool:
        """Returns whether a segment is lent to this worker."""
        return any((each.owner, each.number) == (owner, number) for each in self.open.values())

    def returned(self) -> list[Loan]:
        """Takes out and returns the loans whose views are all freed."""
        loans = []
        while self.ended:
            loan = self.open.pop(id(self.ended.popleft()), None)
            if loan is not None:  # else there was no memory to enter it
                loans.append(loan)
        return loans

    def forget(self, owner: MemberId, number: int | None = None) -> None:
        """Forgets a segment of an owner, or all: they will not be lent again.

        They stay mapped until the last view of them is freed.
        """
        if number is None:
            self._known.pop(owner, None)
        else:
            self._known.get(owner, {}).pop(number, None)

    def keep_all(self) -> None:
        """Makes what is lent now private, before a fork: the child will see it too.

        The owner must not use it again, and neither process may see what the other writes. From
        now on the system copies a page for the process that writes to it.

        Raises:
            OSError: some mappings could not be made private; all loans are marked `keep` anyway.
        """
        with contextlib.ExitStack() as each:  # all of them, even if one fails
            for loan in list(self.open.values()):
                if not loan.keep:
                    loan.keep = True
                    memory = loan.memory()
                    if memory is not None and memory.fd < 0:
                        continue  # private already, and other messages may name its segment
                    if memory is not None:
                        each.callback(_make_private, memory)
                    self.forget(loan.owner, loan.number)

    def close(self) -> None:
        """Forgets all segments."""
        self._known.clear()


def _map(fd: int) -> SegmentMap:
    """Maps a segment; the mapping owns the descriptor.

    Raises:
        OSError: it can't be mapped, or there was no descriptor left to receive it.
        ProtocolError: it is no memory, or its owner could make it smaller. To read what is gone
            would end this process.
    """
    if fd < 0:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    try:
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ProtocolError("expected a segment that can't shrink")
        memory = SegmentMap.of(fd, os.fstat(fd).st_size, mmap.MAP_SHARED)
    except BaseException:
        os.close(fd)
        raise
    memory.fd = fd
    page_locks.add(memory)
    return memory


# Replaces a mapping's memory in place, which Python's mmap can't do.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE


def _make_private(memory: SegmentMap) -> None:
    """Maps the same file over a mapping, copy-on-write; the contents stay."""
    page_locks.unlock(memory)  # or a device would read the file's pages, whatever is written here
    try:
        _map_over(memory, memory.fd, mmap.MAP_PRIVATE)
    except OSError as error:
        what = "a received tensor can't be made private before a fork"
        raise OSError(error.errno, what) from error


def _map_over(memory: SegmentMap, fd: int, flags: int) -> None:
    """Maps a file over a mapping."""
    address, protection = memory.address, mmap.PROT_READ | mmap.PROT_WRITE
    mapped = _libc.mmap(address, len(memory), protection, flags | _MAP_FIXED, fd, 0)
    if mapped != address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

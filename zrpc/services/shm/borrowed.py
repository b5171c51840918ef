"""The receiver's side of shared memory: segments of peers, mapped while they are in use."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from collections import deque
from typing import Any, NamedTuple

from zrpc.wire.member_id import MemberId

__all__ = ["Descriptor", "Loan", "Loans"]


class Descriptor(NamedTuple):
    """Where a segment is found, in the owner's process, and how to recognise it."""

    number: int
    pid: int
    fd: int
    inode: int
    size: int


class SegmentMap(mmap.mmap):
    """A mapped segment, with the descriptor that it was mapped from."""

    fd = -1

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class Loan:
    """A segment that is lent to this worker for one message.

    Attributes:
        owner: the worker that owns the segment.
        number: the number of the segment among the owner's.
        views: one for each buffer of the message. The message's tensors refer to them, and
            when the last is freed the loan can be returned.
        left: how many of them are not freed; counted in the I/O thread.
        memory: a weak reference to the mapping.
        keep: whether the segment must not be used again, since a fork of this process may read it.
    """

    def __init__(
        self,
        owner: MemberId,
        number: int,
        memory: SegmentMap,
        places: list[tuple[int, int]],
        ended: deque[weakref.ref[Any]],
    ) -> None:
        self.owner = owner
        self.number = number
        self.left = len(places)
        self.keep = False
        # Weak: the views keep the mapping, and a loan of a closed agent should not.
        self.memory = weakref.ref(memory)
        # Arrays of ctypes and not memoryviews: whatever is made from an array's buffer refers to
        # the array; made from a memoryview, it may refer to the object below.
        views = [(ctypes.c_char * size).from_buffer(memory, offset) for offset, size in places]
        # A view may be freed in any thread, at any moment. That is only recorded, by a C function,
        # which no signal handler interrupts (what that raised would be lost).
        self.watched = [weakref.ref(view, ended.append) for view in views]
        self.views: list[ctypes.Array[ctypes.c_char]] | None = views


class Loans:
    """All that is lent to one worker. For one thread at a time, except for `ended`.

    Attributes:
        ended: the weak references to views that have been freed.
    """

    def __init__(self) -> None:
        self.ended: deque[weakref.ref[Any]] = deque()
        self._mapped: dict[tuple[int, int], SegmentMap] = {}
        # Loans that have not ended, by the identity of the weak references to their views.
        self._open: dict[int, Loan] = {}

    def probe(self, descriptor: Descriptor) -> bool:
        """Returns whether this process can open a segment of a peer."""
        try:
            self._map(descriptor).close()
        except OSError:
            return False
        return True

    def borrow(
        self, owner: MemberId, descriptor: Descriptor, places: list[tuple[int, int]]
    ) -> Loan:
        """Maps a segment that a message came in; the places are offset and size of each buffer.

        Raises:
            OSError: it can't be opened.
        """
        key = (owner, descriptor.number)
        memory = self._mapped.get(key)
        if memory is None:
            memory = self._mapped[key] = self._map(descriptor)
        loan = Loan(owner, descriptor.number, memory, places, self.ended)
        self._open.update((id(watched), loan) for watched in loan.watched)
        return loan

    def returned(self) -> list[Loan]:
        """Takes out and returns the loans whose views are all freed."""
        loans = []
        while self.ended:
            loan = self._open.pop(id(self.ended.popleft()))
            loan.left -= 1
            if loan.left == 0:
                loans.append(loan)
        return loans

    def forget(self, owner: MemberId, number: int | None = None) -> None:
        """Forgets a segment of an owner, or all: they will not be lent again."""
        for key in [k for k in self._mapped if k[0] == owner and number in (None, k[1])]:
            del self._mapped[key]  # unmapped when the last view of it goes

    def keep_all(self) -> None:
        """Makes what is lent now private, before a fork: the child will see it too.

        The owner must not use it again, and neither process may see what the other writes. From
        now on the system copies a page for the process that writes to it.

        Raises:
            OSError: some mappings could not be made private; all loans are marked `keep` anyway.
        """
        with contextlib.ExitStack() as each:  # all of them, even if one fails
            for loan in list(self._open.values()):
                if not loan.keep:
                    loan.keep = True
                    memory = loan.memory()
                    if memory is not None:
                        each.callback(_make_private, memory)
                    self._mapped.pop((loan.owner, loan.number), None)

    def close(self) -> None:
        """Forgets all segments."""
        self._mapped.clear()

    @staticmethod
    def _map(descriptor: Descriptor) -> SegmentMap:
        fd = os.open(f"/proc/{descriptor.pid}/fd/{descriptor.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            if (status.st_ino, status.st_size) != (descriptor.inode, descriptor.size):
                raise FileNotFoundError(f"expected the segment {descriptor}, found another file")
            memory = SegmentMap(fd, descriptor.size)
            memory.fd = fd
            return memory
        except BaseException:
            os.close(fd)
            raise


# Replaces a mapping's memory in place, which Python's mmap can't do.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_MAP_FIXED = 0x10


def _make_private(memory: SegmentMap) -> None:
    """Maps the same file over a mapping, copy-on-write; the contents stay."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    flags = mmap.MAP_PRIVATE | _MAP_FIXED
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    mapped = _libc.mmap(address, len(memory), protection, flags, memory.fd, 0)
    if mapped != address:
        raise OSError(ctypes.get_errno(), "a received tensor can't be made private before a fork")

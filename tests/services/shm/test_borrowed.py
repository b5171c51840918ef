"""The receiver's side: what is mapped, when a loan ends, and what a peer can't make it read."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.services.shm.sharing import MIB, inode_of, segments_mapped, segments_open
from zrpc.errors import ProtocolError
from zrpc.services.shm import borrowed as loans_module
from zrpc.services.shm.borrowed import Loans
from zrpc.services.shm.segments import Segment, SegmentPool
from zrpc.testing.procfs import descriptors

OWNER = 3


@pytest.fixture
def pool() -> Iterator[Any]:
    pool = SegmentPool(8 * MIB)
    yield pool
    pool.close()


@pytest.fixture
def loans() -> Iterator[Any]:
    loans = Loans()
    yield loans
    loans.close()


def lent(pool: SegmentPool, *contents: bytes) -> tuple[Segment, list[tuple[int, int]]]:
    """A segment with these contents, and their places."""
    segment, offsets = pool.lend([len(content) for content in contents], 1)
    pool.written(segment)
    for offset, content in zip(offsets, contents, strict=True):
        segment.write(offset, (ctypes.c_char * len(content)).from_buffer_copy(content))
    return segment, [(o, len(c)) for o, c in zip(offsets, contents, strict=True)]


def views_of(loans: Loans, segment: Segment, places: Any, owner: int = OWNER) -> list:
    if not loans.knows(owner, segment.number):
        loans.add(owner, segment.number, os.dup(segment.fd))
    return loans.borrow(owner, segment.number, places)


def borrow(loans: Loans, pool: SegmentPool, *contents: bytes) -> tuple[Segment, list]:
    """The views that a message gets, and nothing else that refers to them."""
    segment, places = lent(pool, *contents)
    return segment, views_of(loans, segment, places)


def returned(loans: Loans) -> list[tuple[int, int]]:
    gc.collect()
    return [(loan.owner, loan.number) for loan in loans.returned()]


def array_of(view: Any) -> Any:
    return np.frombuffer(view, dtype=np.uint8)


def tensor_of(view: Any) -> Any:
    return torch.frombuffer(view, dtype=torch.uint8)


READERS = {
    "array": array_of,
    "slice of an array": lambda view: array_of(view)[5:9],
    "tensor of an array": lambda view: torch.from_numpy(array_of(view)),
    "tensor": tensor_of,
    "slice of a tensor": lambda view: tensor_of(view)[5:9],
    "another dtype": lambda view: tensor_of(view).view(torch.float32),
    "storage": lambda view: tensor_of(view).untyped_storage(),
    "array of a tensor": lambda view: tensor_of(view).numpy(),
    "memoryview": memoryview,
    "slice of a memoryview": lambda view: memoryview(view)[5:9],
    "read-only memoryview": lambda view: memoryview(view).toreadonly(),
    "graph": lambda view: (tensor_of(view).view(torch.float32).requires_grad_() ** 2).grad_fn,
    "cycle": lambda view: (lambda cell: cell.append(cell) or cell)([tensor_of(view)]),
}


def test_whatever_reads_a_view_keeps_the_loan(loans: Any, pool: Any) -> None:
    for kind, read in READERS.items():
        segment, views = borrow(loans, pool, b"a" * 64)
        reader = read(views.pop())
        assert returned(loans) == [], kind
        del reader
        assert returned(loans) == [(OWNER, segment.number)], kind


def test_a_segment_is_mapped_once(loans: Any, pool: Any) -> None:
    for _ in range(3):
        segment, views = borrow(loans, pool, b"a" * MIB)
        del views
        assert returned(loans) == [(OWNER, segment.number)]
        pool.give_back(segment.number, 1)
    inode = inode_of(segment)
    assert segments_open() == [inode]
    pool.close()
    assert segments_mapped() == [inode]
    loans.close()
    assert segments_mapped() == segments_open() == []


@pytest.mark.parametrize("private", [False, True])
def test_only_a_mapping_that_is_not_private_takes_a_descriptor(
    loans: Any, pool: Any, private: bool
) -> None:
    segment, places = lent(pool, b"a" * MIB)
    before = len(descriptors())
    loans.add(OWNER, segment.number, os.dup(segment.fd))
    views = loans.borrow(OWNER, segment.number, places, private)
    loans.forget(OWNER)
    assert len(descriptors()) == before + (not private)
    assert bytes(views[0]) == b"a" * MIB
    views.clear()
    assert len(descriptors()) == before


def test_segments_of_two_owners_with_one_number_are_two(loans: Any) -> None:
    pools = [SegmentPool(MIB), SegmentPool(MIB)]
    views = []
    for owner, pool in enumerate(pools):
        segment, places = lent(pool, bytes([owner]) * 64)
        assert segment.number == 0
        views += views_of(loans, segment, places, owner)
    assert [bytes(view) for view in views] == [bytes([owner]) * 64 for owner in range(2)]
    loans.forget(0)
    for pool in pools:
        pool.close()
    assert len(segments_mapped()) == 2  # one is in use, the other not forgotten
    views.clear()
    assert [loan.owner for loan in loans.returned()] in ([0, 1], [1, 0])
    assert len(segments_mapped()) == 1


def test_before_a_fork_all_is_kept_though_one_fails(
    loans: Any, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    views = [borrow(loans, pool, b"a" * 64)[1] for _ in range(3)]
    make_private, private = loans_module._make_private, []

    def fail_first(memory: Any) -> None:
        private.append(memory)
        if len(private) == 1:
            raise OSError(12, "Cannot allocate memory")
        make_private(memory)

    monkeypatch.setattr(loans_module, "_make_private", fail_first)
    with pytest.raises(OSError, match="allocate"):
        loans.keep_all()
    assert len(private) == 3
    del private[:]
    views.clear()
    gc.collect()
    assert [loan.keep for loan in loans.returned()] == [True] * 3


def memfd(size: int, *seals: int) -> int:
    fd = os.memfd_create("zrpc-hostile", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    for seal in seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seal)
    return fd


def read_only(size: int) -> int:
    fd = memfd(size, fcntl.F_SEAL_SHRINK)
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    finally:
        os.close(fd)


WRONG = {
    "nothing": lambda: -1,
    "memory that may shrink": lambda: memfd(4096),
    "memory that may not be written": lambda: memfd(4096, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE),
    "read-only": lambda: read_only(4096),
    "too small": lambda: memfd(63, fcntl.F_SEAL_SHRINK),
    "empty": lambda: memfd(0, fcntl.F_SEAL_SHRINK),
    "enormous": lambda: memfd(2**63 - 1, fcntl.F_SEAL_SHRINK),
    "not memory": lambda: os.open("/dev/zero", os.O_RDWR),
    "a file": lambda: os.open(__file__, os.O_RDONLY),
}


def test_a_descriptor_of_something_else_is_refused_and_closed(loans: Any) -> None:
    before = descriptors()
    for what, make in WRONG.items():
        loans.add(OWNER, 0, make())
        with pytest.raises((OSError, ValueError, ProtocolError), match=r"."):
            loans.borrow(OWNER, 0, [(0, 64)])
        loans.forget(OWNER)
        assert descriptors() == before, what
        assert segments_mapped() == [], what

"""The receiver's side: what is mapped, when a loan ends, and what a peer can't make it read."""

from __future__ import annotations

import ctypes
import gc
import os
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.services.shm.sharing import MIB, segments_mapped, segments_open
from zrpc.services.shm import borrowed as loans_module
from zrpc.services.shm.borrowed import Descriptor, Loans
from zrpc.services.shm.segments import Segment, SegmentPool, supports_segments

pytestmark = pytest.mark.skipif(not supports_segments(), reason="needs memfds")

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


def descriptor_of(segment: Segment) -> Descriptor:
    return Descriptor(segment.number, os.getpid(), segment.fd, segment.inode, segment.size)


def lent(pool: SegmentPool, *contents: bytes) -> tuple[Segment, list[tuple[int, int]]]:
    """A segment with these contents, and their places."""
    segment, offsets = pool.lend([len(content) for content in contents], 1)
    pool.written(segment)
    for offset, content in zip(offsets, contents, strict=True):
        segment.write(offset, (ctypes.c_char * len(content)).from_buffer_copy(content))
    return segment, [(o, len(c)) for o, c in zip(offsets, contents, strict=True)]


def borrow(loans: Loans, pool: SegmentPool, *contents: bytes) -> tuple[Segment, list]:
    """The views that a message gets, and nothing else that refers to them."""
    segment, places = lent(pool, *contents)
    loan = loans.borrow(OWNER, descriptor_of(segment), places)
    views, loan.views = loan.views, None
    return segment, views


def returned(loans: Loans) -> list[tuple[int, int]]:
    gc.collect()
    return [(loan.owner, loan.number) for loan in loans.returned()]


def test_a_loan_ends_with_its_last_view(loans: Any, pool: Any) -> None:
    segment, views = borrow(loans, pool, b"a" * 64, b"b" * 64, b"c" * 64)
    while views:
        assert returned(loans) == []
        views.pop()
    assert returned(loans) == [(OWNER, segment.number)]
    assert returned(loans) == []


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
    assert segments_open() == [segment.inode]
    pool.close()
    assert segments_mapped() == [segment.inode]
    loans.close()
    assert segments_mapped() == segments_open() == []


def test_segments_of_two_owners_with_one_number_are_two(loans: Any) -> None:
    pools = [SegmentPool(MIB), SegmentPool(MIB)]
    views = []
    for owner, pool in enumerate(pools):
        segment, places = lent(pool, bytes([owner]) * 64)
        assert segment.number == 0
        loan = loans.borrow(owner, descriptor_of(segment), places)
        views.append(loan.views[0])
        loan.views = None
    assert [bytes(view) for view in views] == [bytes([owner]) * 64 for owner in range(2)]
    loans.forget(0)
    for pool in pools:
        pool.close()
    assert len(segments_mapped()) == 2  # one is in use, the other not forgotten
    views.clear()
    del loan
    assert [loan.owner for loan in loans.returned()] in ([0, 1], [1, 0])
    assert len(segments_mapped()) == 1


def test_a_forgotten_segment_stays_readable_as_long_as_it_is_used(loans: Any, pool: Any) -> None:
    segment, views = borrow(loans, pool, b"a" * 64)
    tensor = tensor_of(views.pop())
    pool.close()
    loans.forget(OWNER, segment.number)
    assert segments_mapped() == [segment.inode]
    assert bytes(tensor.tolist()) == b"a" * 64
    del tensor
    assert returned(loans) == [(OWNER, segment.number)]
    assert segments_mapped() == []


def test_forgetting_one_segment_leaves_the_others(loans: Any, pool: Any) -> None:
    first, views = borrow(loans, pool, b"a" * 64)
    second, others = borrow(loans, pool, b"b" * 64)
    del views, others
    assert len(returned(loans)) == 2
    loans.forget(OWNER, first.number)
    pool.close()
    assert segments_mapped() == [second.inode]
    loans.forget(OWNER)
    assert segments_mapped() == []


def test_after_a_fork_what_was_lent_then_is_kept(loans: Any, pool: Any) -> None:
    _, before = borrow(loans, pool, b"a" * 64)
    loans.keep_all()
    _, after = borrow(loans, pool, b"b" * 64)
    before.clear()
    after.clear()
    gc.collect()
    assert [loan.keep for loan in loans.returned()] == [True, False]


def test_before_a_fork_all_is_kept_even_if_one_can_not_be_made_private(
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


def test_a_loan_that_has_ended_does_not_live_on(loans: Any, pool: Any) -> None:
    segment, places = lent(pool, b"a" * 64)
    loan = loans.borrow(OWNER, descriptor_of(segment), places)
    loan.views = None
    ended = weakref.ref(loan)
    assert loans.returned() == [loan]
    del loan
    gc.collect()
    assert ended() is None


WRONG = {
    "another inode": lambda right: right._replace(inode=right.inode + 1),
    "a larger size": lambda right: right._replace(size=right.size + 4096),
    "a smaller size": lambda right: right._replace(size=right.size - 4096),
    "an enormous size": lambda right: right._replace(size=2**64 - 1),
    "no size": lambda right: right._replace(size=0),
    "a descriptor that isn't open": lambda right: right._replace(fd=2**20),
    "another process": lambda right: right._replace(pid=os.getppid()),
    "a process that isn't": lambda right: right._replace(pid=2**32 - 1),
    "standard input": lambda right: right._replace(fd=0),
}


def test_a_descriptor_of_something_else_is_refused(loans: Any, pool: Any) -> None:
    segment, places = lent(pool, b"a" * 64)
    right = descriptor_of(segment)
    assert loans.probe(right)
    for what, wrong in WRONG.items():
        assert not loans.probe(wrong(right)), what
        with pytest.raises(OSError, match=r"."):
            loans.borrow(OWNER, wrong(right), places)
    assert returned(loans) == []
    pool.close()
    assert not loans.probe(right)
    assert segments_open() == segments_mapped() == []

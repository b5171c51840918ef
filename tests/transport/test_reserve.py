"""Descriptors that are kept for when there are no others."""

from __future__ import annotations

import os

import pytest

from zrpc.transport import reserve as module
from zrpc.transport.reserve import DescriptorReserve

SIZE = 4


class Files:
    """Stands for the system: so many descriptors are left."""

    def __init__(self, left: int) -> None:
        self.left = left
        self.open_ones: set[int] = set()
        self.devnull, self.O_RDONLY, self.O_CLOEXEC = os.devnull, os.O_RDONLY, os.O_CLOEXEC

    def dup(self, fd: int) -> int:
        assert fd in self.open_ones
        return self.open(os.devnull, 0)

    def open(self, path: str, flags: int) -> int:
        if not self.left:
            raise OSError("Too many open files")
        self.left -= 1
        fd = min(set(range(1000)) - self.open_ones)
        self.open_ones.add(fd)
        return fd

    def close(self, fd: int) -> None:
        self.open_ones.remove(fd)
        self.left += 1


@pytest.fixture
def files(monkeypatch):
    files = Files(100)
    monkeypatch.setattr(module, "os", files)
    return files


@pytest.fixture
def reserve(files):
    return DescriptorReserve(SIZE)


def test_it_is_there_while_an_agent_is(reserve, files):
    for _ in range(2):
        reserve.join()
        assert files.left == 100 - SIZE
    assert reserve.look()
    assert files.left == 100 - SIZE
    reserve.leave()
    assert files.left == 100 - SIZE
    reserve.leave()
    assert files.left == 100
    assert reserve.look()
    assert files.left == 100


def test_it_is_given_up_when_there_are_no_others(reserve, files):
    reserve.join()
    files.left = 0
    assert reserve.look()  # there are these now
    assert reserve.given_up
    assert files.left == SIZE
    assert reserve.look()
    assert files.left == SIZE  # they are left to those who need them
    assert not reserve.release()
    files.left = 0
    assert not reserve.look()
    reserve.leave()


def test_it_is_taken_again_when_there_is_room_for_more_than_it(reserve, files):
    reserve.join()
    files.left = 0
    reserve.look()
    files.left = 2 * SIZE - 1
    reserve.look()
    assert files.left == 2 * SIZE - 1
    assert reserve.given_up
    files.left = 2 * SIZE
    assert reserve.look()
    assert files.left == SIZE
    assert not reserve.given_up
    reserve.leave()
    assert files.left == 2 * SIZE


def test_it_is_given_up_on_demand(reserve, files):
    reserve.join()
    assert reserve.release()
    assert files.left == 100
    assert not reserve.release()
    reserve.leave()
    assert files.left == 100


def test_none_to_begin_with(reserve, files):
    files.left = 1
    reserve.join()
    assert files.left == 1
    reserve.leave()
    assert files.left == 1

"""Descriptors in reserve for when there are no others."""

from __future__ import annotations

import os

import pytest

from zrpc.transport import fd_reserve as module
from zrpc.transport.fd_reserve import DescriptorReserve

SIZE = 4


class Files:
    """Stands for the system, with a number of descriptors left."""

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
def files(monkeypatch: pytest.MonkeyPatch) -> Files:
    files = Files(100)
    monkeypatch.setattr(module, "os", files)
    return files


@pytest.fixture
def reserve(files: Files) -> DescriptorReserve:
    return DescriptorReserve(SIZE)


def test_the_reserve_is_kept_while_it_has_users(reserve: DescriptorReserve, files: Files) -> None:
    for _ in range(2):
        reserve.add_user()
        assert files.left == 100 - SIZE
    assert reserve.refresh()
    assert files.left == 100 - SIZE
    reserve.remove_user()
    assert files.left == 100 - SIZE
    reserve.remove_user()
    assert files.left == 100
    assert reserve.refresh()
    assert files.left == 100


def test_the_reserve_is_released_when_no_others_are_left(
    reserve: DescriptorReserve, files: Files
) -> None:
    reserve.add_user()
    files.left = 0
    assert reserve.refresh()  # the reserved ones are left now
    assert reserve.released
    assert files.left == SIZE
    assert reserve.refresh()
    assert files.left == SIZE  # they stay available for others
    assert not reserve.release()
    files.left = 0
    assert not reserve.refresh()
    reserve.remove_user()


def test_the_reserve_is_filled_again_when_twice_its_size_is_left(
    reserve: DescriptorReserve, files: Files
) -> None:
    reserve.add_user()
    files.left = 0
    reserve.refresh()
    files.left = 2 * SIZE - 1
    reserve.refresh()
    assert files.left == 2 * SIZE - 1
    assert reserve.released
    files.left = 2 * SIZE
    assert reserve.refresh()
    assert files.left == SIZE
    assert not reserve.released
    reserve.remove_user()
    assert files.left == 2 * SIZE

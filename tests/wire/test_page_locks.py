"""When memory is locked for a device, and that it stays mapped until it is unlocked."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from tests.support.forks import exit_code, fork
from tests.support.waiting import SOON, until
from zrpc.wire.page_locks import COPIES, CudaRuntime, MappedMemory, PageLocks

DEVICE = torch.device("cuda:1")
DEVICES = [torch.device("cpu"), DEVICE]
SIZE = 1 << 20


class Recorder(CudaRuntime):
    """Locks nothing, and records what it was asked."""

    def __init__(self) -> None:
        self.locked: list[tuple[int, int, torch.device]] = []
        self.unlocked: list[int] = []
        self.refuses = False
        self.idle = threading.Event()
        self.idle.set()

    def lock(self, address: int, nbytes: int, device: torch.device) -> bool:
        self.locked.append((address, nbytes, device))
        return not self.refuses

    def unlock(self, address: int) -> None:
        assert self.idle.wait(SOON)
        self.unlocked.append(address)


@pytest.fixture
def driver() -> Recorder:
    return Recorder()


@pytest.fixture
def locks(driver: Recorder) -> PageLocks:
    return PageLocks(driver)


def added(locks: PageLocks) -> MappedMemory:
    memory = MappedMemory(-1, SIZE)
    locks.add(memory)
    return memory


def copy(locks: PageLocks, memory: MappedMemory, times: int = COPIES) -> None:
    for _ in range(times):
        locks.note_copy(memory.address, SIZE, DEVICES)


def is_mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split(maxsplit=1)[0].split("-") for line in lines]
    return any(int(start, 16) <= address < int(end, 16) for start, end in spans)


def test_memory_is_locked_once_when_much_was_copied(locks: PageLocks, driver: Recorder) -> None:
    memory = added(locks)
    copy(locks, memory, COPIES - 1)
    assert driver.locked == []
    locks.note_copy(memory.address + SIZE // 2, SIZE // 2, DEVICES)
    assert driver.locked == []
    locks.note_copy(memory.address + SIZE - 1, SIZE // 2, DEVICES)
    copy(locks, memory)
    assert driver.locked == [(memory.address, SIZE, DEVICE)]


def test_other_memory_is_not_locked(locks: PageLocks, driver: Recorder) -> None:
    memory, other = added(locks), MappedMemory(-1, SIZE)
    copy(locks, other)
    locks.note_copy(memory.address + SIZE, COPIES * SIZE, DEVICES)
    assert driver.locked == []


def test_the_number_of_locked_bytes_has_a_limit(driver: Recorder) -> None:
    locks = PageLocks(driver, limit=SIZE)
    first, second = added(locks), added(locks)
    copy(locks, first)
    copy(locks, second)
    assert len(driver.locked) == 1
    del first
    locks.unlock_ended(SOON)
    copy(locks, second, 1)
    assert [address for address, _, _ in driver.locked][1:] == [second.address]


def test_a_driver_that_refuses_is_not_asked_again(locks: PageLocks, driver: Recorder) -> None:
    driver.refuses = True
    memory = added(locks)
    copy(locks, memory, 3 * COPIES)
    assert (len(driver.locked), locks.nbytes) == (1, 0)
    del memory
    assert not locks.ended


def test_freed_memory_stays_mapped_until_it_is_unlocked(locks: PageLocks, driver: Recorder) -> None:
    memory = added(locks)
    address = memory.address
    copy(locks, memory)
    driver.idle.clear()
    del memory
    locks.unlock_ended()  # does not wait for the device
    assert is_mapped(address)
    driver.idle.set()
    until(lambda: not is_mapped(address), "it is unmapped")
    assert (driver.unlocked, locks.nbytes) == ([address], 0)


def test_what_was_unlocked_is_not_locked_again(locks: PageLocks, driver: Recorder) -> None:
    memory = added(locks)
    copy(locks, memory)
    locks.unlock(memory)
    copy(locks, memory, 3 * COPIES)
    assert (len(driver.locked), driver.unlocked) == (1, [memory.address])
    del memory
    assert not locks.ended


@pytest.mark.system
def test_a_forked_child_frees_memory_without_the_driver(locks: PageLocks, driver: Recorder) -> None:
    memory = added(locks)
    address = memory.address
    copy(locks, memory)
    owned = [memory]
    del memory

    def free() -> bool:
        locks.forget()
        owned.clear()
        return bool(driver.unlocked or locks.ended or is_mapped(address))

    assert exit_code(fork(free)) == 0
    assert is_mapped(address)

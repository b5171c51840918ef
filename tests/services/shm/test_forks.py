"""Shared memory and forks of a worker."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import zrpc
from tests.services.shm.sharing import (
    keep,
    kept,
    large,
    own_layer,
    processes,
    segments_mapped,
    segments_open,
    sends_by_segments,
    until_returned,
)
from tests.support.forks import exit_code, fork
from tests.support.waiting import until
from zrpc.options import ZmqRpcBackendOptions
from zrpc.services.shm.service import SharedMemoryService
from zrpc.testing import Mesh
from zrpc.testing.procfs import descriptors, socket_names
from zrpc.transport.address import DESCRIPTORS

pytestmark = sends_by_segments


def content(tensor: Any) -> Any:
    # Not by torch, whose threads are gone in a child.
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


class Child:
    """A fork of this process, which answers each question that it is asked."""

    def __init__(self, answer: Any) -> None:
        ask, self._ask = os.pipe()
        self._answers, answers = os.pipe()

        def work() -> None:
            os.close(self._ask)  # or its end would never be seen
            while question := os.read(ask, 1):
                os.write(answers, answer(question))

        self._pid = fork(work)
        os.close(ask)
        os.close(answers)

    def ask(self, question: bytes = b"?") -> Any:
        os.write(self._ask, question)
        if not select.select([self._answers], [], [], 20)[0]:
            os.kill(self._pid, signal.SIGKILL)
        return os.read(self._answers, 1)

    def end(self) -> None:
        os.close(self._ask)
        os.close(self._answers)
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def fork_and_drop(rank: Any) -> Any:
    """The child goes on to read a tensor that this process drops."""
    expected = content(large(7))
    tensor = zrpc.rpc_sync(rank, large, (7,))
    assert content(tensor) == expected
    received = [tensor]
    del tensor
    child = Child(lambda _: b"=" if content(received[0]) == expected else b"!")
    try:
        answers = [child.ask()]
        received.clear()  # the child has a list of its own
        until(lambda: not own_layer().loans.open, collect=True)
        for i in range(6):
            other = zrpc.rpc_sync(rank, large, (100 + i,))
            assert content(other) == content(large(100 + i))
            other.zero_()
            del other
            answers.append(child.ask())
        return answers
    finally:
        child.end()


@pytest.mark.system
@processes
def test_a_fork_of_the_receiver_goes_on_reading(mesh: Mesh) -> None:
    assert mesh.run(1, fork_and_drop, 0) == [b"="] * 7
    mesh.run(0, lambda: until_returned(own_layer()))


def fork_and_write(rank: Any) -> Any:
    tensor = zrpc.rpc_sync(rank, large, (7,))
    before = content(tensor)

    def answer(question: Any) -> Any:
        if question == b"w":
            ctypes.memset(tensor.data_ptr(), 0xFF, tensor.numel() * tensor.element_size())
        return b"=" if content(tensor) == before else b"!"

    child = Child(answer)
    try:
        tensor[-1] = -1
        seen_by_child = child.ask()
        tensor[-1] = large(7)[-1]
        child.ask(b"w")
        return seen_by_child, content(tensor) == before
    finally:
        child.end()


@pytest.mark.system
@processes
def test_a_fork_and_its_parent_do_not_see_what_the_other_writes(mesh: Mesh) -> None:
    assert mesh.run(1, fork_and_write, 0) == (b"=", True)


@pytest.mark.system
def test_a_fork_does_not_hold_descriptors_that_wait_for_its_parent(joined: Mesh) -> None:
    paths = socket_names()
    ours = {link for link in descriptors().values() if paths.get(link, "").endswith(DESCRIPTORS)}
    assert len(ours) == len(joined)
    child = Child(lambda _: b"!" if ours & set(descriptors().values()) else b"=")
    assert child.ask() == b"="
    child.end()


@pytest.mark.system
def test_a_fork_keeps_no_memory_of_segments_but_what_it_can_read(joined: Mesh) -> None:
    zrpc.rpc_sync(1, keep, ("held", large(7)))
    zrpc.rpc_sync(1, torch.numel, (large(8),))
    held, expected = kept()["held"], content(large(7))
    assert len(segments_open()) == 2

    def answer(question: bytes) -> bytes:
        found = segments_open() if question == b"o" else segments_mapped()
        return b"%d" % len(found) if content(held) == expected else b"!"

    child = Child(answer)
    assert (child.ask(b"o"), child.ask(b"m")) == (b"1", b"1")
    child.end()
    assert torch.equal(zrpc.rpc_sync(1, torch.neg, (large(9),)), -large(9))


@pytest.mark.system
def test_agents_may_start_and_end_while_a_fork_begins() -> None:
    """What is lent to the others must be kept; an error would be one that can't be raised."""
    agent: Any = SimpleNamespace(options=ZmqRpcBackendOptions())
    stays = [SharedMemoryService(agent) for _ in range(200)]
    ended = threading.Event()

    def come_and_go() -> None:
        while not ended.is_set():
            _passing = [SharedMemoryService(agent) for _ in range(10)]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        assert [exit_code(fork(lambda: None)) for _ in range(20)] == [0] * 20
    finally:
        ended.set()
        sys.setswitchinterval(interval)
        thread.join(20)
    assert len(stays) == 200

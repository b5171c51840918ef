"""File descriptors that go from one worker of a host to another."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.descriptors import few_descriptors
from zrpc.testing.procfs import descriptors
from zrpc.transport.address import DESCRIPTORS
from zrpc.transport.descriptors import NO_DESCRIPTOR, DescriptorSocket

NOTE = struct.Struct("<QQ")


class Worker:
    """One of three, in a directory of its own."""

    def __init__(self, number: int, base: Path) -> None:
        self.number = number
        self.directory = base / str(number)
        self.directory.mkdir()
        self.socket = DescriptorSocket(self.directory)
        self.endpoints = {peer: f"ipc://{base}/{peer}/inbox" for peer in range(3)}

    def send(self, to: int, number: int, content: bytes) -> None:
        fd = memory(content)
        try:
            self.socket.send(self.number, self.endpoints[to], number, fd)
        finally:
            os.close(fd)

    def received(self) -> list[tuple[int, int, bytes]]:
        """What has come: the content of each file, which is closed."""
        found = []
        for peer, number, fd in self.socket.receive(self.endpoints.__getitem__):
            assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
            found.append((peer, number, os.pread(fd, 100, 0)))
            os.close(fd)
        return found

    def send_raw(self, to: int, data: bytes, *fds: int) -> None:
        """Sends anything, from this worker's address."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        place = str(self.directory.with_name(str(to)) / DESCRIPTORS)
        self.socket._socket.sendmsg([data], rights, 0, place)


def memory(content: bytes) -> int:
    fd = os.memfd_create("content", os.MFD_CLOEXEC)
    os.write(fd, content)
    return fd


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[list[Worker]]:
    before = descriptors()
    made = [Worker(number, tmp_path) for number in range(3)]
    yield made
    for each in made:
        each.socket.close()
    assert descriptors() == before


def test_a_descriptor_comes_with_its_sender_and_its_number(workers: list[Worker]) -> None:
    first, second, third = workers
    first.send(2, 7, b"of the first")
    second.send(2, 7, b"of the second")
    first.send(2, 2**64 - 1, b"another")
    first.socket.close()  # what it has sent stays
    assert third.received() == [
        (0, 7, b"of the first"),
        (1, 7, b"of the second"),
        (0, 2**64 - 1, b"another"),
    ]
    assert third.received() == second.received() == []


def test_the_sender_is_told_if_there_is_no_room_or_no_receiver(workers: list[Worker]) -> None:
    first, second, third = workers
    sent = 0
    with contextlib.suppress(BlockingIOError):
        while sent < 100_000:
            first.send(1, sent, b"")
            sent += 1
    assert [number for _, number, _ in second.received()] == list(range(sent))
    assert 0 < sent < 100_000
    first.send(1, 0, b"again")
    assert second.received() == [(0, 0, b"again")]
    third.socket.close()
    with pytest.raises(ConnectionRefusedError):
        first.send(2, 0, b"")
    (third.directory / DESCRIPTORS).unlink()
    with pytest.raises(FileNotFoundError):
        first.send(2, 0, b"")


def test_strangers_and_nonsense_are_discarded_with_their_descriptors(
    workers: list[Worker], tmp_path: Path
) -> None:
    first, second, _ = workers
    fd = memory(b"hostile")
    opened = descriptors()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        for name in ("", "stranger"):
            if name:
                stranger.bind(str(tmp_path / name))
            for peer in (0, 1, 9):
                place = str(second.directory / DESCRIPTORS)
                stranger.sendmsg([NOTE.pack(peer, 0)], rights, 0, place)
    first.send_raw(1, b"", fd)
    first.send_raw(1, NOTE.pack(2, 0), fd)  # in the name of another
    first.send_raw(1, NOTE.pack(0, 0)[:-1], fd)
    first.send_raw(1, NOTE.pack(0, 3), fd, fd, fd)  # too many: one is taken
    assert second.received() == [(0, 3, b"hostile")]
    assert descriptors() == opened
    os.close(fd)


def test_if_the_process_may_have_no_more_descriptors_none_is_reported(
    workers: list[Worker],
) -> None:
    first, second, _ = workers
    first.send(1, 3, b"too much")
    with few_descriptors():
        found = list(second.socket.receive(second.endpoints.__getitem__))
    assert found == [(0, 3, NO_DESCRIPTOR)]
    first.send_raw(1, NOTE.pack(0, 3))  # a message without any
    assert list(second.socket.receive(second.endpoints.__getitem__)) == [(0, 3, NO_DESCRIPTOR)]
    first.send(1, 4, b"fits")
    assert second.received() == [(0, 4, b"fits")]


def test_a_socket_that_cant_be_bound_is_closed(workers: list[Worker]) -> None:
    before = descriptors()
    with pytest.raises(OSError, match="Address already in use"):
        DescriptorSocket(workers[0].directory)
    assert descriptors() == before

"""Waiting for several descriptors at once."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from zrpc.transport.poller import Poller, supports_polling

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.skipif(not supports_polling(), reason="needs epoll"),
]

SOON = 5.0


@pytest.fixture
def poller(no_leaks):
    poller = Poller()
    yield poller
    poller.close()


@pytest.fixture
def ends(no_leaks):
    """Two sockets that are connected."""
    with_room, other = socket.socketpair()
    with with_room, other:
        with_room.setblocking(False)
        yield with_room, other


def test_a_descriptor_is_called_for_while_it_can_be_read(poller, ends):
    calls = []
    poller.watch_readable(ends[0].fileno(), lambda: calls.append(None))
    poller.poll(0)
    assert calls == []
    ends[1].send(b"x")
    poller.poll(SOON)
    poller.poll(SOON)
    assert len(calls) == 2
    ends[0].recv(1)
    poller.poll(0)
    assert len(calls) == 2


def test_a_descriptor_is_called_for_when_it_can_be_written(poller, ends):
    try:
        while True:
            ends[0].send(bytes(65536))
    except BlockingIOError:
        pass
    calls = []
    poller.watch_writable(ends[0].fileno(), lambda: calls.append(None))
    poller.poll(0)
    assert calls == []
    while not calls:
        ends[1].recv(1 << 20)
        poller.poll(0)


def test_one_that_is_watched_from_another_thread_ends_a_wait(poller, ends):
    waits, called = threading.Event(), threading.Event()

    def wait():
        waits.set()
        while not called.is_set():
            poller.poll(60)

    thread = threading.Thread(target=wait)
    thread.start()
    waits.wait()
    poller.watch_writable(ends[0].fileno(), called.set)
    thread.join(SOON)
    assert not thread.is_alive()


def test_one_that_is_forgotten_in_the_same_turn_is_not_called_for(poller):
    pairs = [socket.socketpair() for _ in range(2)]
    calls = []

    def forget_the_others(mine):
        calls.append(mine)
        for pair in pairs:
            if pair[0].fileno() != mine:
                poller.forget(pair[0].fileno())

    for pair in pairs:
        fd = pair[0].fileno()
        poller.watch_readable(fd, lambda fd=fd: forget_the_others(fd))
        pair[1].send(b"x")
    poller.poll(SOON)
    assert len(calls) == 1
    for each in (end for pair in pairs for end in pair):
        each.close()


def test_what_cannot_be_watched_is_not(poller, tmp_path):
    with open(tmp_path / "file", "w") as file, pytest.raises(PermissionError):  # not for files
        poller.watch_readable(file.fileno(), pytest.fail)
    reader, writer = os.pipe()  # with the number of the file, which nothing is known of
    os.write(writer, b"x")
    calls = []
    poller.watch_readable(reader, lambda: calls.append(None))
    poller.poll(SOON)
    assert len(calls) == 1
    poller.forget(reader)
    os.close(reader)
    os.close(writer)

"""The poller: which callbacks run, and when."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.waiting import SOON
from zrpc.transport.poller import Poller

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def poller(no_leaks: None) -> Iterator[Poller]:
    poller = Poller()
    yield poller
    poller.close()


@pytest.fixture
def ends(no_leaks: None) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yields two connected sockets."""
    with_room, other = socket.socketpair()
    with with_room, other:
        with_room.setblocking(False)
        yield with_room, other


def test_the_callback_runs_while_the_descriptor_is_readable(
    poller: Poller, ends: tuple[socket.socket, socket.socket]
) -> None:
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


def test_the_callback_runs_when_the_descriptor_is_writable(
    poller: Poller, ends: tuple[socket.socket, socket.socket]
) -> None:
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


def test_a_watch_added_by_another_thread_ends_a_poll(
    poller: Poller, ends: tuple[socket.socket, socket.socket]
) -> None:
    waits, called = threading.Event(), threading.Event()

    def wait() -> None:
        waits.set()
        while not called.is_set():
            poller.poll(60)

    thread = threading.Thread(target=wait)
    thread.start()
    waits.wait()
    poller.watch_writable(ends[0].fileno(), called.set)
    thread.join(SOON)
    assert not thread.is_alive()


def test_a_descriptor_forgotten_during_a_poll_is_not_reported(poller: Poller) -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    calls = []

    def forget_the_others(mine: int) -> None:
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


def test_a_descriptor_that_cannot_be_watched_is_refused(poller: Poller, tmp_path: Path) -> None:
    with open(tmp_path / "file", "w") as file, pytest.raises(PermissionError):  # not for files
        poller.watch_readable(file.fileno(), pytest.fail)
    reader, writer = os.pipe()  # with the number of the refused file
    os.write(writer, b"x")
    calls = []
    poller.watch_readable(reader, lambda: calls.append(None))
    poller.poll(SOON)
    assert len(calls) == 1
    poller.forget(reader)
    os.close(reader)
    os.close(writer)

"""The poller: which callbacks run, and when."""

from __future__ import annotations

import os
import socket
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

"""Waits for descriptors, in one thread or in one in place of another."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from tests.support.waiting import SOON
from zrpc.transport.poller import Poller


@pytest.fixture
def poller(no_leaks: None) -> Iterator[Poller]:
    with contextlib.closing(Poller()) as poller:
        yield poller


def test_a_descriptor_forgotten_during_a_poll_is_not_reported(poller: Poller) -> None:
    pairs, calls = [socket.socketpair() for _ in range(2)], []

    def forget_the_other(mine: int) -> None:
        calls.append(mine)
        [other] = [here.fileno() for here, _ in pairs if here.fileno() != mine]
        poller.forget(other)

    for here, there in pairs:
        poller.watch_readable(here.fileno(), partial(forget_the_other, here.fileno()))
        there.send(b"x")
    poller.poll(SOON)
    assert len(calls) == 1
    for each in itertools.chain(*pairs):
        each.close()


def test_wait_returns_for_what_poll_reports_unless_it_is_masked(poller: Poller) -> None:
    reported: list[int] = []
    reading, writing = os.pipe()
    try:
        poller.watch_readable(reading, lambda: reported.append(reading))
        os.write(writing, b"x")
        poller.wait(SOON)
        poller.mask()
        begun = time.monotonic()
        poller.wait(0.05)
        assert time.monotonic() - begun >= 0.05
        assert reported == []
        poller.poll(SOON)
        assert reported == [reading]  # masked or not
        waiting = threading.Thread(target=poller.wait, args=(2 * SOON,))
        waiting.start()
        poller.unmask()
        waiting.join(SOON)
        assert not waiting.is_alive()
    finally:
        os.close(reading)
        os.close(writing)

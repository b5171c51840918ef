"""Waits for descriptors, in one thread or in one in place of another."""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Iterator
from functools import partial

import pytest

from tests.support.threads import start_all
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
    here, there = socket.socketpair()
    with here, there:
        poller.watch_readable(here.fileno(), lambda: reported.append(1))
        there.send(b"x")
        assert poller.wait(SOON)
        poller.mask()
        assert not poller.wait(0.05)
        assert reported == []
        poller.poll(SOON)
        assert reported == [1]  # masked or not
        finish = start_all([partial(poller.wait, SOON)], 2 * SOON)
        poller.unmask()
        assert all(finish())

"""Inboxes and mailboxes: what arrives, from whom, and what is left after close()."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import zmq

from tests.support.threads import start_all
from tests.support.waiting import SOON
from tests.transport.numbered import connect, opened, received
from zrpc.transport.address import private_directories
from zrpc.transport.curve import Curve, KeyPair
from zrpc.transport.inbox import Inbox
from zrpc.transport.network import Network

pytestmark = pytest.mark.usefixtures("no_leaks")

INTERFACES = {"ipc": "", "tcp": "127.0.0.1", "ipv6": "::1"}


@pytest.fixture(params=["ipc", "tcp"])
def pair(request: pytest.FixtureRequest, no_leaks: None) -> Iterator[list[Network]]:
    """Two networks that know each other."""
    with opened(ipc=request.param == "ipc") as networks:
        try:
            connect(networks, INTERFACES[request.param])
        except zmq.ZMQError:
            if request.param != "ipv6":
                raise
            pytest.skip("this machine has no IPv6")
        yield networks


def test_wake_ends_a_receive(pair: list[Network]) -> None:
    finish = start_all([partial(pair[0].receive, 60)], SOON)
    pair[0].wake()
    [(identity, first, buffers)] = finish()
    assert (first, buffers) == (b"", [])
    assert identity[:1] == b"w"  # not a member's


def test_no_message_is_overlooked_that_comes_before_heartbeats_are_answered() -> None:
    """A send by the inbox's socket takes note of what has come, and so clears its event."""
    with opened() as networks:  # they also listen for direct connections, and talk by tcp
        connect(networks, "127.0.0.1")
        first, second = networks
        first.send(1, b"before")
        assert received(second)[1] == b"before"
        assert second.receive(0.01) is None
        first.send(1, b"message")
        time.sleep(0.05)  # it has come after the last look
        second.answer_heartbeats(b"hnobody", b"a notice")  # as when a worker is declared dead
        assert received(second)[1] == b"message"


@pytest.mark.parametrize("pair", INTERFACES, indirect=True)
def test_sent_bytes_are_copied(pair: list[Network]) -> None:
    first, second = pair
    buffer = bytearray(b"before" * 20_000)
    first.send(1, b"", [buffer])
    buffer[:6] = b"after!"
    assert received(second)[2] == [b"before" * 20_000]


@pytest.mark.system
def test_any_thread_may_send(pair: list[Network]) -> None:
    first, second = pair

    def send(number: int) -> None:
        for count in range(100):
            first.send(1, b"%d %d" % (number, count), [b"buffer %d" % number])

    finish = start_all([partial(send, number) for number in range(4)], SOON)
    messages = []
    while len(messages) < 400:
        assert first.receive(0) is None  # sends queued messages, also of a thread that queues late
        message = second.receive(0.01)
        if message is not None:
            messages.append((message[1], [bytes(buffer) for buffer in message[2]]))
    assert finish() == [None] * 4
    for number in range(4):
        mine = [m for m in messages if m[0].startswith(b"%d " % number)]
        assert [int(text.split()[1]) for text, _ in mine] == list(range(100))
        assert all(buffers == [b"buffer %d" % number] for _, buffers in mine)


def test_queued_messages_are_sent_before_close_returns(pair: list[Network]) -> None:
    first, second = pair
    for _ in range(50):
        first.send(1, b"x" * 100_000)
    finish = start_all([partial(first.close, SOON, ())], SOON)
    for _ in range(50):
        received(second)
    assert finish() == [None]


def test_sending_after_close_fails(pair: list[Network]) -> None:
    first, second = pair
    first.send(1, b"before")
    received(second)
    first.close(0, ())
    for rank in (0, 1):  # with an open mailbox, and with a new one
        with pytest.raises(zmq.ZMQError):
            first.send(rank, b"after")


@pytest.mark.parametrize("step", ["__init__", "bind_ipc"])
def test_a_network_that_cannot_be_made_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """As if no descriptors were left."""

    def refuse(*_: Any) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    monkeypatch.setattr(Inbox, step, refuse)
    before = sorted(os.listdir("/proc/self/fd"), key=int), private_directories()
    with pytest.raises(zmq.ZMQError):
        Network(b"z0", 0, 2, ipc=True)
    assert (sorted(os.listdir("/proc/self/fd"), key=int), private_directories()) == before


def test_a_worker_that_cant_listen_can_try_again_with_other_keys_and_close() -> None:
    network = Network(b"z0", 0, 2, ipc=True)
    for _ in range(2):
        with pytest.raises(zmq.ZMQError):
            network.listen_tcp("203.0.113.1", Curve(KeyPair.new()))
    assert start_all([lambda: network.close(0, ())], SOON)() == [None]

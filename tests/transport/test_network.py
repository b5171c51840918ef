"""Inboxes and mailboxes: what arrives, from whom, and what is left after close()."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from tests.support.threads import start_all
from tests.support.waiting import SOON
from tests.transport.numbered import received
from zrpc.transport.address import private_directories
from zrpc.transport.curve import Curve, KeyPair
from zrpc.transport.inbox import Inbox
from zrpc.transport.network import Network

pytestmark = pytest.mark.usefixtures("no_leaks")


class Pair:
    """Two networks that know each other."""

    def __init__(self, **kwargs: Any) -> None:
        self.networks = [Network(f"z{rank}".encode(), rank, 2, **kwargs) for rank in (0, 1)]

    def connect(self, endpoints: list[str]) -> None:
        for network in self.networks:
            network.connect(endpoints)

    def close(self) -> None:
        for network in self.networks:
            network.close(0, ())


@pytest.fixture(params=["ipc", "tcp"])
def pair(request: pytest.FixtureRequest, no_leaks: None) -> Iterator[Pair]:
    pair = Pair(ipc=request.param == "ipc")
    if request.param == "ipc":
        pair.connect([f"ipc://{n.directory.socket_path}" for n in pair.networks])
    else:
        pair.connect([network.listen_tcp("127.0.0.1", None) for network in pair.networks])
    yield pair
    pair.close()


@pytest.mark.parametrize("there", [True, False], ids=["there", "late"])
def test_a_receiver_that_spins_gets_its_message(pair: Pair, there: bool) -> None:
    first, second = pair.networks
    second.send(0, b"before")
    assert received(first)[1] == b"before"  # connected: later messages arrive at once
    sender = threading.Thread(target=second.send, args=(0, b"message"))
    if there:
        sender.start()
        sender.join()
    else:
        # Sent while the other spins, or afterwards, when it sleeps.
        threading.Timer(0.05, sender.start).start()
    identity, message, _ = first.receive(SOON, spin=True)
    assert (identity, message) == (b"z1", b"message")
    sender.join()


def test_messages_arrive_by_ipv6() -> None:
    pair = Pair(ipc=False)
    try:
        try:
            pair.connect([network.listen_tcp("::1", None) for network in pair.networks])
        except zmq.ZMQError:
            pytest.skip("this machine has no IPv6")
        pair.networks[0].send(1, b"message")
        assert received(pair.networks[1]) == (b"z0", b"message", [])
    finally:
        pair.close()


def test_wake_ends_a_receive(pair: Pair) -> None:
    network = pair.networks[0]
    found = []
    waiting = threading.Thread(target=lambda: found.append(network.receive(60)))
    waiting.start()
    network.wake()
    waiting.join(SOON)
    assert not waiting.is_alive()
    ((identity, first, buffers),) = found
    assert (first, buffers) == (b"", [])
    assert identity[:1] == b"w"  # not a member's


@pytest.fixture
def pair_with_poller(no_leaks: None) -> Iterator[Pair]:
    """Workers that also listen for direct connections, and talk by tcp."""
    pair = Pair(ipc=True)
    pair.connect([network.listen_tcp("127.0.0.1", None) for network in pair.networks])
    yield pair
    pair.close()


def test_no_message_is_overlooked_that_comes_before_heartbeats_are_answered(
    pair_with_poller: Pair,
) -> None:
    """A send by the inbox's socket takes note of what has come, and so clears its event."""
    first, second = pair_with_poller.networks
    first.send(1, b"before")
    assert received(second)[1] == b"before"
    assert second.receive(0.01) is None
    first.send(1, b"message")
    time.sleep(0.05)  # it has come after the last look
    second.answer_heartbeats(b"hnobody", b"a notice")  # as when a worker is declared dead
    assert received(second)[1] == b"message"


def test_sent_bytes_are_copied(pair: Pair) -> None:
    first, second = pair.networks
    buffer = bytearray(b"before" * 20_000)
    first.send(1, b"", [buffer])
    buffer[:6] = b"after!"
    assert received(second)[2] == [b"before" * 20_000]


@pytest.mark.system
def test_any_thread_may_send(pair: Pair) -> None:
    first, second = pair.networks

    def send(number: int) -> None:
        for count in range(100):
            first.send(1, b"%d %d" % (number, count), [b"buffer %d" % number])

    threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    messages = []
    while len(messages) < 400:
        assert first.receive(0) is None  # sends queued messages, also of a thread that queues late
        message = second.receive(0.01)
        if message is not None:
            messages.append((message[1], [bytes(buffer) for buffer in message[2]]))
    for thread in threads:
        thread.join()
    for number in range(4):
        mine = [m for m in messages if m[0].startswith(b"%d " % number)]
        assert [int(text.split()[1]) for text, _ in mine] == list(range(100))
        assert all(buffers == [b"buffer %d" % number] for _, buffers in mine)


def test_queued_messages_are_sent_before_close_returns(pair: Pair) -> None:
    first, second = pair.networks
    for _ in range(50):
        first.send(1, b"x" * 100_000)
    closing = threading.Thread(target=first.close, args=(SOON, ()))
    closing.start()
    for _ in range(50):
        received(second)
    closing.join(SOON)
    assert not closing.is_alive()


def test_sending_after_close_fails(pair: Pair) -> None:
    first, second = pair.networks
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

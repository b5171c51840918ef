"""Inboxes and mailboxes: what arrives, from whom, and what is left after the end."""

from __future__ import annotations

import os
import threading

import pytest
import zmq
from arrivals import SOON, received, spy_on_senders

import zrpc
from zrpc.testing import local_mesh
from zrpc.transport.network import Network
from zrpc.wire.header import Message

pytestmark = pytest.mark.usefixtures("no_leaks")


class Pair:
    """Two networks that know each other."""

    def __init__(self, **kwargs):
        self.networks = [Network(f"z{rank}".encode(), rank, 2, **kwargs) for rank in (0, 1)]

    def connect(self, endpoints):
        for network in self.networks:
            network.connect(endpoints)

    def close(self):
        for network in self.networks:
            network.close(0, ())


@pytest.fixture(params=["ipc", "tcp"])
def pair(request, no_leaks):
    pair = Pair(ipc=request.param == "ipc")
    if request.param == "ipc":
        pair.connect([f"ipc://{n.directory.socket_path}" for n in pair.networks])
    else:
        pair.connect([network.listen_tcp("127.0.0.1", None) for network in pair.networks])
    yield pair
    pair.close()


def test_messages_arrive_with_their_sender(pair):
    first, second = pair.networks
    first.send(1, b"first", [b"a", bytearray(b"b"), memoryview(b"c")])
    assert received(second) == (b"z0", b"first", [b"a", b"b", b"c"])
    second.send(0, b"second")
    assert received(first) == (b"z1", b"second", [])


@pytest.mark.parametrize("there", [True, False], ids=["there", "late"])
def test_a_receiver_that_spins_gets_its_message(pair, there):
    first, second = pair.networks
    second.send(0, b"before")
    assert received(first)[1] == b"before"  # connected: what comes now comes at once
    sender = threading.Thread(target=second.send, args=(0, b"message"))
    if there:
        sender.start()
        sender.join()
    else:
        # Sent while the other spins; or afterwards, when it has gone to sleep.
        threading.Timer(0.05, sender.start).start()
    identity, message, _ = first.receive(SOON, spin=0.02)
    assert (identity, message) == (b"z1", b"message")
    sender.join()


def test_a_receiver_that_spins_ends_with_its_timeout(pair):
    assert pair.networks[0].receive(0.0, spin=0.001) is None


def test_messages_arrive_by_ipv6():
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


def test_a_worker_sends_to_itself(pair):
    network = pair.networks[0]
    network.send(0, b"to myself", [b"x" * 100_000])
    assert received(network) == (b"z0", b"to myself", [b"x" * 100_000])


def test_messages_of_one_sender_stay_in_order(pair):
    first, second = pair.networks
    for number in range(500):
        first.send(1, b"%d" % number, [b"buffer"] * (number % 3))
    numbers = []
    for _ in range(500):
        assert first.receive(0) is None  # it sends what had to wait for room
        numbers.append(int(received(second)[1]))
    assert numbers == list(range(500))


def test_nothing_arrives(pair):
    assert pair.networks[0].receive(0.01) is None
    assert pair.networks[0].receive(0) is None


def test_wake_ends_a_wait(pair):
    network = pair.networks[0]
    found = []
    waiting = threading.Thread(target=lambda: found.append(network.receive(60)))
    waiting.start()
    network.wake()
    waiting.join(SOON)
    assert not waiting.is_alive()
    ((identity, first, buffers),) = found
    assert (first, buffers) == (b"", [])
    assert identity[:1] == b"w"  # no member's


def test_sent_messages_are_counted(pair):
    first, second = pair.networks
    assert first.sent([0, 1]) == 0
    first.send(1, b"counted")
    first.send(1, b"not counted", counted=False)
    first.send(0, b"counted")
    first.wake()
    assert (first.sent([1]), first.sent([0, 1]), first.sent([7])) == (1, 2, 0)
    received(second)


def test_what_is_sent_is_a_copy(pair):
    first, second = pair.networks
    buffer = bytearray(b"before" * 20_000)
    first.send(1, b"", [buffer])
    buffer[:6] = b"after!"
    assert received(second)[2] == [b"before" * 20_000]


def test_any_thread_may_send(pair):
    first, second = pair.networks

    def send(number):
        for count in range(100):
            first.send(1, b"%d %d" % (number, count), [b"buffer %d" % number])

    threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    messages = []
    while len(messages) < 400:
        assert first.receive(0) is None  # it sends what had to wait for room
        messages.append(received(second))
    for thread in threads:
        thread.join()
    for number in range(4):
        mine = [m for m in messages if m[1].startswith(b"%d " % number)]
        assert [int(first.split()[1]) for _, first, _ in mine] == list(range(100))
        assert all(buffers == [b"buffer %d" % number] for _, _, buffers in mine)


def test_queued_messages_leave_before_the_end(pair):
    first, second = pair.networks
    for _ in range(50):
        first.send(1, b"x" * 100_000)
    closing = threading.Thread(target=first.close, args=(SOON, ()))
    closing.start()
    for _ in range(50):
        received(second)
    closing.join(SOON)
    assert not closing.is_alive()


def test_the_end_does_not_wait_for_the_lost(pair):
    first, second = pair.networks
    second.close(0, ())
    for _ in range(50):
        first.send(1, b"x" * 100_000)
    closing = threading.Thread(target=first.close, args=(60, (1,)))
    closing.start()
    closing.join(SOON)
    assert not closing.is_alive()


def test_nothing_is_sent_after_the_end(pair):
    first, second = pair.networks
    first.send(1, b"before")
    received(second)
    first.close(0, ())
    for rank in (0, 1):  # with a mailbox that was open, and with one that was not
        with pytest.raises(zmq.ZMQError):
            first.send(rank, b"after")


def test_the_end_leaves_no_descriptors_and_no_files(tmp_path):
    def descriptors():
        return sorted(os.listdir("/proc/self/fd"), key=int)

    before = descriptors()
    for _ in range(3):
        pair = Pair(ipc=True)
        paths = [network.directory.path for network in pair.networks]
        pair.connect([f"ipc://{n.directory.socket_path}" for n in pair.networks])
        pair.networks[0].send(1, b"message")
        received(pair.networks[1])
        pair.close()
        assert not any(path.exists() for path in paths)
    assert descriptors() == before


# -- strangers -----------------------------------------------------------------------------


def test_messages_of_strangers_are_dropped_unread(monkeypatch):
    with local_mesh(2) as mesh:
        mesh.run(0, zrpc.rpc_sync, 1, max, args=(1, 2))
        endpoint = f"ipc://{mesh.agent(1)._network.directory.socket_path}"
        senders = spy_on_senders(monkeypatch)
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.linger = 0
            stranger.routing_id = b"stranger"
            stranger.connect(endpoint)
            for frames in ([b""], [b"x" * 10], [Message(1).first_frame(), b"buffer"], [b"", b""]):
                stranger.send_multipart(frames)
            # Its last message arrives too late to matter, or before this: it is answered.
            for _ in range(20):
                assert mesh.run(0, zrpc.rpc_sync, 1, max, args=(1, 2)) == 2
    assert senders
    assert set(senders) <= {0, 1}


def test_bytes_of_a_member_that_are_no_message_are_logged_and_dropped(caplog):
    with local_mesh(2) as mesh:
        network = mesh.agent(0)._network
        network.send(1, b"no message", counted=False)
        network.send(1, b"\xff" * 40, [b"buffer"], counted=False)
        network.send(1, Message(99).first_frame(), counted=False)
        assert mesh.run(0, zrpc.rpc_sync, 1, max, args=(1, 2)) == 2
    assert "expected a header of 32 bytes, found 10" in caplog.text
    assert "found version 255" in caplog.text
    assert "found 99" in caplog.text

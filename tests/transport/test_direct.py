"""Direct connections: what goes that way, what when there is no room, and when they break."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import socket
import threading
import time

import pytest
import zmq
from arrivals import SOON, received, spy_on_senders

import zrpc
from zrpc.testing import local_mesh
from zrpc.transport import stream
from zrpc.transport.direct import DirectMailbox, direct_path
from zrpc.transport.inbox import OutOfMemory
from zrpc.transport.mailbox import Mailbox
from zrpc.transport.network import BULK, Network
from zrpc.transport.poller import supports_polling
from zrpc.transport.reserve import reserve
from zrpc.transport.stream import header
from zrpc.wire.header import Message

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.skipif(not supports_polling(), reason="needs epoll"),
]

FILLING = b"filling " * 1000


@pytest.fixture
def networks(no_leaks):
    """Three that know each other."""
    networks = [Network(f"z{rank}".encode(), rank, 3, ipc=True) for rank in range(3)]
    for network in networks:
        network.connect([endpoint_of(each) for each in networks])
    yield networks
    for network in networks:
        network.close(0, ())


def endpoint_of(network):
    return f"ipc://{network.directory.socket_path}"


def numbers_of(network, count):
    return [int(received(network)[1].split()[0]) for _ in range(count)]


def all_there(network):
    """The numbers of the messages that are there; of one at least."""
    numbers = numbers_of(network, 1)
    while (message := network.receive(0)) is not None:
        numbers.append(int(message[1].split()[0]))
    return numbers


def fill(network, rank):
    """Sends numbered messages until some are queued; returns how many it were."""
    count = 0
    while not (count and network._mailboxes[rank]._queue):
        network.send(rank, *numbered(count))
        count += 1
    for number in range(count, count + 20):
        network.send(rank, *numbered(number))
    return count + 20


def numbered(number):
    """A message that begins with its number, of one frame or of two."""
    return (b"%d" % number, [FILLING]) if number % 2 else (b"%d " % number + FILLING,)


def break_connections(network):
    """Closes all that others have opened to it, with what is unread there."""
    inbox = network._inbox
    for connection in inbox._direct._connections:
        inbox.poller.forget(connection.socket.fileno())
        connection.socket.close()
    inbox._direct._connections.clear()


# -- which way -----------------------------------------------------------------------------


def test_small_messages_go_directly(networks):
    networks[0].send(1, b"first", [b"a", bytearray(b"b"), memoryview(b"c")])
    assert isinstance(networks[0]._mailboxes[1], DirectMailbox)
    assert received(networks[1]) == (b"z0", b"first", [b"a", b"b", b"c"])


@pytest.mark.parametrize(
    ("first", "buffers"),
    [
        (bytes(BULK), []),
        (b"first", [bytes(BULK)]),
        (b"first", [b""] * (BULK // 4)),
    ],
    ids=["first", "others", "many"],
)
def test_large_ones_do_not(networks, first, buffers):
    networks[0].send(1, first, buffers)
    assert isinstance(networks[0]._bulk[1], Mailbox)
    assert 1 not in networks[0]._mailboxes
    assert received(networks[1])[1:] == (first, buffers)


def test_the_largest_of_the_small_arrive(networks):
    frames = (BULK - 6) // 5
    for first, buffers in ((bytes(BULK - 1), []), (b"first", [b"x"] * frames)):
        networks[0].send(1, first, buffers)
        assert networks[0]._bulk == {}
        while (message := networks[1].receive(0)) is None:
            assert networks[0].receive(0) is None  # it sends what had to wait for room
        assert (message[1], [bytes(buffer) for buffer in message[2]]) == (first, buffers)


def test_a_peer_that_does_not_listen_directly_is_reached(networks):
    direct_path(endpoint_of(networks[1])).unlink()
    networks[0].send(1, b"message", [b"buffer"])
    assert isinstance(networks[0]._mailboxes[1], Mailbox)
    assert received(networks[1]) == (b"z0", b"message", [b"buffer"])


def test_a_message_at_the_socket_has_its_turn_among_direct_ones(networks):
    networks[0].send(1, bytes(BULK))
    limit = time.monotonic() + SOON
    first = b""
    while len(first) < BULK:  # there is always a direct one as well
        networks[2].send(1, b"small")
        _, first, _ = received(networks[1])
        assert time.monotonic() < limit


def test_the_socket_lies_in_the_private_directory(networks):
    directory = networks[1].directory.path
    path = direct_path(endpoint_of(networks[1]))
    assert (path.parent, path.is_socket()) == (directory, True)
    assert directory.stat().st_mode & 0o777 == 0o700
    networks[1].close(0, ())
    assert not directory.exists()


# -- no room -------------------------------------------------------------------------------


def test_what_finds_no_room_is_sent_in_order_when_there_is_some(networks):
    count = fill(networks[0], 1)
    assert networks[0].sent([1]) == count
    numbers = all_there(networks[1])
    assert len(numbers) < count  # the rest waits for the sender's thread that receives
    found = []
    sender = threading.Thread(target=lambda: found.append(networks[0].receive(60)))
    sender.start()
    numbers += numbers_of(networks[1], count - len(numbers))
    assert numbers == list(range(count))
    assert not networks[0]._mailboxes[1]._watched
    networks[0].wake()
    sender.join(SOON)
    assert not sender.is_alive()


def test_a_message_leaves_when_room_comes_while_the_thread_sleeps(networks):
    """The queue begins when the thread that receives waits already."""
    found = []
    sleeper = threading.Thread(target=lambda: found.append(networks[0].receive(60)))
    sleeper.start()
    count = fill(networks[0], 1)
    assert numbers_of(networks[1], count) == list(range(count))
    networks[0].wake()
    sleeper.join(SOON)
    assert not sleeper.is_alive()


def test_what_is_queued_leaves_within_the_linger_though_another_peer_reads_nothing(networks):
    fill(networks[0], 1)
    count = fill(networks[0], 2)
    closing = threading.Thread(target=networks[0].close, args=(0.3, ()))
    closing.start()
    assert numbers_of(networks[2], count) == list(range(count))
    closing.join(SOON)
    assert not closing.is_alive()


def test_what_is_queued_is_dropped_after_the_linger(networks):
    count = fill(networks[0], 1)
    begun = time.monotonic()
    networks[0].close(0.1, ())
    assert 0.1 <= time.monotonic() - begun < SOON
    numbers = all_there(networks[1])
    assert numbers == list(range(len(numbers)))
    assert len(numbers) < count


def test_what_is_queued_for_the_lost_is_not_waited_for(networks):
    fill(networks[0], 1)
    begun = time.monotonic()
    networks[0].close(60, (1,))
    assert time.monotonic() - begun < SOON


def test_a_worker_that_is_dropped_while_messages_are_queued(networks):
    fill(networks[0], 1)
    mailbox = networks[0]._mailboxes[1]
    networks[0].drop(1)
    mailbox._flush()  # as where the thread that receives was about to
    assert networks[0].receive(0) is None
    networks[0].send(2, b"message")
    assert received(networks[2])[1] == b"message"


# -- connections that break ----------------------------------------------------------------


def test_a_broken_connection_goes_on_by_zeromq(networks):
    for number in range(3):
        networks[0].send(1, b"%d" % number)
    assert numbers_of(networks[1], 3) == [0, 1, 2]
    break_connections(networks[1])
    for number in range(3, 6):
        networks[0].send(1, b"%d" % number)
    networks[0].send(1, b"6", counted=False)
    assert isinstance(networks[0]._mailboxes[1], Mailbox)
    assert numbers_of(networks[1], 4) == [3, 4, 5, 6]
    assert networks[0].sent([1]) == 6


@pytest.mark.parametrize("found_by", ["receiver", "sender"])
def test_what_is_queued_goes_on_by_zeromq(networks, found_by):
    count = fill(networks[0], 1)
    queued = len(networks[0]._mailboxes[1]._queue)
    assert all_there(networks[1]) == list(range(count - queued))
    break_connections(networks[1])
    if found_by == "receiver":
        assert networks[0].receive(0) is None
        assert isinstance(networks[0]._mailboxes[1], Mailbox)
    else:  # is first told when it sends itself, since the queue is watched no more
        networks[0]._mailboxes[1]._on_broken = lambda _: None
        assert networks[0].receive(0) is None
        assert isinstance(networks[0]._mailboxes[1], DirectMailbox)
    networks[0].send(1, b"%d last" % count)
    assert isinstance(networks[0]._mailboxes[1], Mailbox)
    assert numbers_of(networks[1], queued + 1) == list(range(count - queued, count + 1))
    assert networks[0].sent([1]) == count + 1


def test_a_thread_that_sends_while_another_replaces_the_connection(networks):
    networks[0].send(1, b"before")
    mailbox = networks[0]._mailboxes[1]
    assert received(networks[1])[1] == b"before"
    assert mailbox.give_up() == []
    with pytest.raises(ConnectionError):  # not as if this worker had ended
        mailbox.send(b"message")
    networks[0].send(1, b"after")
    assert received(networks[1])[1] == b"after"
    assert networks[0].sent([1]) == 2


def test_no_thread_is_told_of_a_broken_connection(networks):
    errors = []
    networks[0].send(1, b"0")
    received(networks[1])
    barrier = threading.Barrier(5)

    def send():
        barrier.wait()
        try:
            for _ in range(200):
                networks[0].send(1, b"1")
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    barrier.wait()
    break_connections(networks[1])
    for thread in threads:
        thread.join()
    networks[0].send(1, b"2")
    assert networks[0].receive(0) is None  # it finds the break, where all was queued before that
    while received(networks[1])[1] != b"2":
        pass
    assert errors == []
    assert networks[0].sent([1]) == 802


def test_a_peer_that_is_gone_is_sent_to_in_vain(networks):
    networks[0].send(1, b"before")
    networks[1].close(0, ())
    networks[0].send(1, b"after")
    assert networks[0].sent([1]) == 2
    networks[0].drop(1)
    assert networks[0].sent([1]) == 0


@pytest.fixture
def no_watch_for_room(networks, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "no more watches")

    monkeypatch.setattr(networks[0]._inbox.poller, "watch_writable", refuse)


def test_nothing_follows_half_a_message(networks, no_watch_for_room):
    networks[0].send(1, b"0")
    mailbox, sent = networks[0]._mailboxes[1], 1
    with contextlib.suppress(ConnectionError):
        while True:
            mailbox.send(*numbered(sent))
            sent += 1
    assert numbers_of(networks[1], sent) == list(range(sent))
    with pytest.raises(ConnectionError):  # another thread, before the connection is replaced
        mailbox.send(*numbered(sent))


def test_no_way_to_watch_for_room(networks, no_watch_for_room):
    count = 0
    while not count or isinstance(networks[0]._mailboxes[1], DirectMailbox):
        networks[0].send(1, *numbered(count))
        count += 1
    # By two ways, and none of them twice, though the first had begun to go the other.
    assert sorted(numbers_of(networks[1], count)) == list(range(count))
    assert networks[0].sent([1]) == count
    assert networks[1].receive(0.02) is None


# -- what the system has no more of --------------------------------------------------------


@contextlib.contextmanager
def no_descriptors():
    """Takes all that this process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in held:
            os.close(fd)


def test_no_descriptors_for_a_connection_that_comes(networks):
    networks[0].send(1, b"1")
    reserve.release()
    with no_descriptors():
        assert networks[1].receive(0) is None
        networks[0].send(1, b"2")
        assert networks[1].receive(0.02) is None
        assert networks[1].look_after_descriptors()
        # Or a thread that waits would find it ready again and again.
        assert not networks[1]._inbox._direct._listening
    assert not networks[1].look_after_descriptors()
    networks[0].send(1, b"3")
    assert numbers_of(networks[1], 3) == [1, 2, 3]


def test_the_reserve_serves_a_connection(networks):
    with no_descriptors():
        assert not reserve.given_up
        networks[0].send(1, b"1")  # takes from it, and leaves some for the other end
        assert reserve.given_up
        assert numbers_of(networks[1], 1) == [1]


def test_no_descriptors_for_a_mailbox(networks):
    reserve.release()
    with no_descriptors(), pytest.raises(zmq.ZMQError) as caught:
        networks[0].send(1, b"1")
    assert caught.value.errno == errno.EMFILE
    assert networks[0].sent([1]) == 0
    networks[0].send(1, b"2")
    assert numbers_of(networks[1], 1) == [2]


def test_a_connection_that_cannot_be_watched_is_later(networks, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "no more watches")

    networks[0].send(1, b"1")
    with monkeypatch.context() as patch:
        patch.setattr(networks[1]._inbox.poller, "watch_readable", refuse)
        assert networks[1].receive(0) is None
        networks[1].look_after_descriptors()
        assert "no more watches" in caplog.text
    networks[0].send(1, b"2")
    assert networks[1].receive(0.02) is None
    networks[1].look_after_descriptors()
    assert numbers_of(networks[1], 2) == [1, 2]


def test_no_memory_for_a_message(networks, monkeypatch):
    def refuse(*_):
        raise MemoryError

    networks[0].send(1, b"before")
    received(networks[1])
    networks[0].send(1, b"first", [b"buffer"])
    networks[0].send(1, b"second")
    monkeypatch.setattr(stream, "bytearray", refuse, raising=False)
    with pytest.raises(OutOfMemory) as caught:
        networks[1].receive(SOON)
    assert (caught.value.identity, caught.value.first) == (b"z0", b"first")
    assert received(networks[1])[1] == b"second"


# -- what others write there ---------------------------------------------------------------


def connected(network):
    """A stranger's connection; of the same user, since nobody else gets at the socket."""
    stranger = socket.socket(socket.AF_UNIX)
    stranger.settimeout(SOON)
    stranger.connect(str(direct_path(endpoint_of(network))))
    return stranger


def test_garbage_closes_its_connection_only(networks, caplog):
    networks[0].send(1, b"before")
    received(networks[1])
    with connected(networks[1]) as stranger:
        stranger.sendall(header(b"z2") + b"z2" + header(b"message") + b"message" + b"\xff" * 100)
        assert received(networks[1]) == (b"z2", b"message", [])  # that was well-formed
        with contextlib.suppress(ConnectionResetError):  # some was unread
            assert stranger.recv(1) == b""
    assert "a direct connection is closed" in caplog.text
    networks[0].send(1, b"after")
    assert isinstance(networks[0]._mailboxes[1], DirectMailbox)
    assert received(networks[1]) == (b"z0", b"after", [])


def test_connections_that_end_in_the_midst_of_a_message(networks):
    whole = header(b"z2") + b"z2" + header(b"message", [b"buffer"]) + b"message" + b"buffer"
    for size in range(len(whole)):
        with connected(networks[1]) as stranger:
            stranger.sendall(whole[:size])
    networks[0].send(1, b"message")
    assert received(networks[1]) == (b"z0", b"message", [])
    assert networks[1].receive(0.02) is None


def test_bytes_that_come_one_by_one(networks):
    with connected(networks[1]) as stranger:
        for byte in header(b"z2") + b"z2" + header(b"message", [b"a"]) + b"message" + b"a":
            assert networks[1].receive(0) is None
            stranger.sendall(bytes([byte]))
        assert received(networks[1]) == (b"z2", b"message", [b"a"])


def test_messages_of_strangers_are_dropped_unread(monkeypatch):
    with local_mesh(2) as mesh:
        mesh.run(0, zrpc.rpc_sync, 1, max, args=(1, 2))
        senders = spy_on_senders(monkeypatch)
        with connected(mesh.agent(1)._network) as stranger:
            for first in (b"stranger", b"", b"x" * 10, Message(1).first_frame()):
                stranger.sendall(header(first) + first)
            stranger.sendall(b"\xff" * 8)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""  # all is read
            assert mesh.run(0, zrpc.rpc_sync, 1, max, args=(1, 2)) == 2
    assert senders
    assert set(senders) <= {0, 1}


# -- processes -----------------------------------------------------------------------------


def call_until_queued(pid):
    """Calls a worker that is stopped, until messages are queued, and kills it."""
    from zrpc.current import current_agent

    futures, network = [], current_agent()._network
    while not network._mailboxes[1]._queue:
        futures.append(zrpc.rpc_async(1, len, (bytes(20_000),)))
    futures += [zrpc.rpc_async(1, len, (bytes(20_000),)) for _ in range(10)]
    os.kill(pid, signal.SIGKILL)
    return {outcome_of(future) for future in futures}


def outcome_of(future):
    try:
        future.wait()
    except Exception as error:
        return type(error).__name__
    return "answer"


@pytest.mark.zrpc(workers=3, processes=True, options={"rpc_timeout": 20})
def test_a_peer_is_killed_while_messages_are_queued(mesh):
    assert mesh.run(0, zrpc.rpc_sync, 1, max, (1, 2)) == 2
    mesh.pause(1)
    assert mesh.run(0, call_until_queued, mesh.pid(1)) == {"WorkerDied"}
    mesh.kill(1)
    assert mesh.run(0, zrpc.rpc_sync, 2, max, (1, 2)) == 2
    mesh.shutdown()

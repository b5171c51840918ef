"""Direct connections: which messages use them, and what happens if they are full, or break."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from functools import partial
from itertools import count
from typing import Any

import pytest
import zmq

from tests.support.descriptors import few_descriptors
from tests.support.steps import at_entry
from tests.support.threads import start_all
from tests.support.waiting import SOON
from tests.transport.numbered import (
    all_there,
    break_connections,
    endpoint_of,
    fill,
    numbers_of,
    received,
    ways,
)
from zrpc.transport.chunks import head_of_remnant, remnant
from zrpc.transport.fd_reserve import reserve
from zrpc.transport.framing import header
from zrpc.transport.network import BULK_BYTES, Network
from zrpc.transport.poller import Poller
from zrpc.transport.unix_stream import direct_path

pytestmark = pytest.mark.usefixtures("no_leaks")

# -- routing -------------------------------------------------------------------------------


@pytest.mark.system
def test_large_messages_use_zeromq(networks: list[Network]) -> None:
    for first, buffers in (
        (bytes(BULK_BYTES), []),
        (b"first", [bytes(BULK_BYTES)]),
        (b"first", [b""] * (BULK_BYTES // 4)),
    ):
        networks[0].send(1, first, buffers)
        assert received(networks[1])[1:] == (first, buffers)
    assert ways(networks[0], 1) == {"ipc"}


def test_the_largest_small_messages_arrive(networks: list[Network]) -> None:
    frames = (BULK_BYTES - 6) // 5
    for first, buffers in ((bytes(BULK_BYTES - 1), []), (b"first", [b"x"] * frames)):
        networks[0].send(1, first, buffers)
        assert ways(networks[0], 1) == {"direct"}
        while (message := networks[1].receive(0)) is None:
            assert networks[0].receive(0) is None  # sends queued messages
        assert (message[1], [bytes(buffer) for buffer in message[2]]) == (first, buffers)


def test_a_peer_without_a_direct_socket_is_reached_by_zeromq(networks: list[Network]) -> None:
    direct_path(endpoint_of(networks[1])).unlink()
    networks[0].send(1, b"message", [b"buffer"])
    assert ways(networks[0], 1) == {"ipc"}
    assert received(networks[1]) == (b"z0", b"message", [b"buffer"])


def test_direct_messages_do_not_starve_zeromq(networks: list[Network]) -> None:
    networks[0].send(1, bytes(BULK_BYTES))
    limit = time.monotonic() + SOON
    first = b""
    while len(first) < BULK_BYTES:  # a direct one is always waiting as well
        networks[2].send(1, b"small")
        _, first, _ = received(networks[1])
        assert time.monotonic() < limit


# -- no room -------------------------------------------------------------------------------


def test_room_wakes_a_receiving_thread_to_send_the_queue(networks: list[Network]) -> None:
    """The queue begins when the receiving thread already waits."""
    finish = start_all([partial(networks[0].receive, 60)], SOON)
    count = fill(networks[0], 1)
    assert numbers_of(networks[1], count) == list(range(count))
    networks[0].wake()
    assert finish() != [None]


@pytest.mark.system
def test_a_peer_that_reads_nothing_does_not_hold_up_another_at_close(
    networks: list[Network],
) -> None:
    fill(networks[0], 1)
    count = fill(networks[0], 2)
    finish = start_all([partial(networks[0].close, 0.3, ())], SOON)
    assert numbers_of(networks[2], count) == list(range(count))
    assert finish() == [None]
    arrived = all_there(networks[1])
    assert arrived == list(range(len(arrived)))
    assert len(arrived) < count


def test_close_does_not_wait_for_messages_to_lost_peers(networks: list[Network]) -> None:
    fill(networks[0], 1)
    begun = time.monotonic()
    networks[0].close(60, (1,))
    assert time.monotonic() - begun < SOON


def test_a_peer_is_dropped_while_messages_are_queued(networks: list[Network]) -> None:
    fill(networks[0], 1)
    networks[0].drop(1)
    assert networks[0].receive(0) is None
    networks[0].send(2, b"message")
    assert received(networks[2])[1] == b"message"


# -- exhausted resources -------------------------------------------------------------------


def refuse_to_watch(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "no more watches")


def test_no_descriptors_for_an_incoming_connection(networks: list[Network]) -> None:
    networks[0].send(1, b"1")
    reserve.release()
    with few_descriptors():
        assert networks[1].receive(0) is None
        networks[0].send(1, b"2")
        assert networks[1].receive(0.02) is None
        assert networks[1].look_after_descriptors()
    assert not networks[1].look_after_descriptors()
    networks[0].send(1, b"3")
    assert numbers_of(networks[1], 3) == [1, 2, 3]


def test_a_connection_uses_the_reserve(networks: list[Network]) -> None:
    with few_descriptors():
        assert not reserve.released
        networks[0].send(1, b"1")  # uses a part, and leaves some for the other end
        assert reserve.released
        assert numbers_of(networks[1], 1) == [1]


def test_no_descriptors_for_a_mailbox(networks: list[Network]) -> None:
    reserve.release()
    with few_descriptors(), pytest.raises(zmq.ZMQError) as caught:
        networks[0].send(1, b"1")
    assert caught.value.errno == errno.EMFILE
    assert networks[0].sent([1]) == 0
    networks[0].send(1, b"2")
    assert numbers_of(networks[1], 1) == [2]


@pytest.mark.parametrize("error", [OSError, MemoryError, RecursionError])
def test_a_connection_that_cannot_be_watched_is_watched_later(
    networks: list[Network],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: type[Exception],
) -> None:
    def refuse(*_: Any) -> None:
        raise error("no more watches")

    networks[0].send(1, b"1")
    with monkeypatch.context() as patch:
        patch.setattr(Poller, "watch_readable", refuse)
        assert networks[1].receive(0) is None
        networks[1].look_after_descriptors()
        assert "no more watches" in caplog.text
    networks[0].send(1, b"2")
    assert networks[1].receive(0.02) is None
    networks[1].look_after_descriptors()
    assert numbers_of(networks[1], 2) == [1, 2]


# -- malformed bytes -----------------------------------------------------------------------


def connected(network: Network) -> socket.socket:
    """Returns a stranger's connection, of the same user, since no other has access."""
    stranger = socket.socket(socket.AF_UNIX)
    stranger.settimeout(SOON)
    stranger.connect(str(direct_path(endpoint_of(network))))
    return stranger


def test_garbage_closes_its_connection_only(
    networks: list[Network], caplog: pytest.LogCaptureFixture
) -> None:
    networks[0].send(1, b"before")
    received(networks[1])
    with connected(networks[1]) as stranger:
        stranger.sendall(header(b"z2") + b"z2" + header(b"message") + b"message" + b"\xff" * 100)
        assert received(networks[1]) == (b"z2", b"message", [])  # that was well-formed
        with contextlib.suppress(ConnectionResetError):  # some was unread
            assert stranger.recv(1) == b""
    assert "a direct connection is closed" in caplog.text
    networks[0].send(1, b"after")
    assert ways(networks[0], 1) == {"direct"}
    assert received(networks[1]) == (b"z0", b"after", [])


def test_connections_that_close_within_a_message(networks: list[Network]) -> None:
    whole = header(b"z2") + b"z2" + header(b"message", [b"buffer"]) + b"message" + b"buffer"
    for size in range(len(whole)):
        with connected(networks[1]) as stranger:
            stranger.sendall(whole[:size])
    networks[0].send(1, b"message")
    assert received(networks[1]) == (b"z0", b"message", [])
    assert networks[1].receive(0.02) is None


# -- connections that break ----------------------------------------------------------------


def test_a_broken_connection_is_replaced_by_zeromq(networks: list[Network]) -> None:
    for number in range(3):
        networks[0].send(1, b"%d" % number)
    assert numbers_of(networks[1], 3) == [0, 1, 2]
    break_connections(networks[1])
    for number in range(3, 6):
        networks[0].send(1, b"%d" % number)
    networks[0].send(1, b"6", counted=False)
    assert ways(networks[0], 1) == {"direct", "ipc"}
    assert numbers_of(networks[1], 4) == [3, 4, 5, 6]
    assert networks[0].sent([1]) == 6


@pytest.mark.parametrize("found_by", ["receiver", "close"])
def test_queued_messages_of_a_broken_connection_go_by_zeromq(
    networks: list[Network], found_by: str
) -> None:
    count, numbers = fill(networks[0], 1), all_there(networks[1])
    assert numbers == list(range(len(numbers)))
    assert len(numbers) < count
    break_connections(networks[1])
    if found_by == "receiver":
        assert networks[0].receive(0) is None
        networks[0].send(1, b"%d last" % count)
        count += 1
        assert networks[0].sent([1]) == count
    finish = start_all([partial(networks[0].close, SOON, ())], SOON)
    numbers += numbers_of(networks[1], count - len(numbers))
    assert numbers == list(range(count))
    assert finish() == [None]


def test_no_sender_sees_a_broken_connection(networks: list[Network]) -> None:
    networks[0].send(1, b"0")
    received(networks[1])
    barrier = threading.Barrier(5)

    def send() -> None:
        barrier.wait()
        for _ in range(200):
            networks[0].send(1, b"1")

    finish = start_all([send] * 4, SOON)
    barrier.wait()
    break_connections(networks[1])
    assert finish() == [None] * 4
    networks[0].send(1, b"2")
    assert networks[0].receive(0) is None  # finds the break if all was queued before it
    while received(networks[1])[1] != b"2":
        pass
    assert networks[0].sent([1]) == 802


def test_sending_to_a_closed_peer_raises_nothing(networks: list[Network]) -> None:
    networks[0].send(1, b"before")
    networks[1].close(0, ())
    networks[0].send(1, b"after")
    assert networks[0].sent([1]) == 2
    networks[0].drop(1)
    assert networks[0].sent([1]) == 0


def test_a_connection_that_cannot_be_watched_for_room_is_replaced(
    networks: list[Network], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Poller, "watch_writable", refuse_to_watch)
    count = fill(networks[0], 1)
    assert ways(networks[0], 1) == {"direct", "ipc"}
    # Both ways, and none of them twice, although the first had been sent in part.
    assert sorted(numbers_of(networks[1], count)) == list(range(count))
    assert networks[0].sent([1]) == count
    assert networks[1].receive(0.02) is None


def test_no_memory_for_a_message_loses_no_other(networks: list[Network]) -> None:
    """It has none at the n-th function that the receiver begins."""

    def fail() -> None:
        raise MemoryError

    networks[0].send(1, b"first")
    received(networks[1])
    for number in count(1):
        for first in (b"a", b"b", b"c"):
            networks[0].send(1, first, [first * 2000])
        found: list[bytes] = []
        with at_entry(number, fail) as steps, contextlib.suppress(MemoryError):
            found.append(received(networks[1])[1])
        while len(found) < 3:
            found.append(received(networks[1])[1])
        remnants = [each for each in found if head_of_remnant(each) is not None]
        assert [each for each in found if each not in remnants] == [
            each for each in (b"a", b"b", b"c") if remnant(each) not in remnants
        ]
        assert len(remnants) <= 1, steps.place
        if not steps.place:
            break
    assert not remnants
    assert ways(networks[0], 1) == {"direct"}

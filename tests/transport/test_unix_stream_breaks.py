"""Direct connections that break: ZeroMQ carries what follows."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from itertools import count
from typing import Any

import pytest

import zrpc
from tests.support.steps import at_entry
from tests.support.waiting import SOON
from tests.transport.arrivals import received
from tests.transport.numbered import all_there, break_connections, fill, numbers_of, ways
from zrpc.testing import Mesh
from zrpc.transport.chunks import head_of_remnant, remnant
from zrpc.transport.network import Network

pytestmark = pytest.mark.usefixtures("no_leaks")

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
    closing = threading.Thread(target=networks[0].close, args=(SOON, ()))
    closing.start()
    numbers += numbers_of(networks[1], count - len(numbers))
    assert numbers == list(range(count))
    closing.join(SOON)
    assert not closing.is_alive()


def test_no_sender_sees_a_broken_connection(networks: list[Network]) -> None:
    errors = []
    networks[0].send(1, b"0")
    received(networks[1])
    barrier = threading.Barrier(5)

    def send() -> None:
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
    assert networks[0].receive(0) is None  # finds the break if all was queued before it
    while received(networks[1])[1] != b"2":
        pass
    assert errors == []
    assert networks[0].sent([1]) == 802


def test_sending_to_a_closed_peer_raises_nothing(networks: list[Network]) -> None:
    networks[0].send(1, b"before")
    networks[1].close(0, ())
    networks[0].send(1, b"after")
    assert networks[0].sent([1]) == 2
    networks[0].drop(1)
    assert networks[0].sent([1]) == 0


def test_a_connection_that_cannot_be_watched_for_room_is_replaced(
    networks: list[Network], no_watch_for_room: None
) -> None:
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


# -- processes -----------------------------------------------------------------------------


def call_until_queued(pid: int) -> set[str]:
    """Calls a stopped worker more than the system has room for, and kills it."""
    futures = [zrpc.rpc_async(1, len, (bytes(20_000),)) for _ in range(100)]
    os.kill(pid, signal.SIGKILL)
    return {outcome_of(future) for future in futures}


def outcome_of(future: Any) -> str:
    try:
        future.wait()
    except Exception as error:
        return type(error).__name__
    return "answer"


@pytest.mark.zrpc(workers=3, processes=True, options={"rpc_timeout": 20})
def test_a_peer_is_killed_while_messages_are_queued(mesh: Mesh) -> None:
    assert mesh.run(0, zrpc.rpc_sync, 1, max, (1, 2)) == 2
    mesh.pause(1)
    assert mesh.run(0, call_until_queued, mesh.pid(1)) == {"WorkerDied"}
    mesh.kill(1)
    assert mesh.run(0, zrpc.rpc_sync, 2, max, (1, 2)) == 2
    mesh.shutdown()

"""The connections of the heartbeats: what they tell, and when."""

from __future__ import annotations

import socket
import time
from urllib.parse import urlsplit

import pytest
import zmq

from zrpc.transport.heartbeat import Heartbeats
from zrpc.transport.probe import ListenerProbe

PATIENCE = 10.0


@pytest.fixture
def context(no_leaks):
    with zmq.Context() as context:
        yield context


@pytest.fixture
def heartbeats(context):
    heartbeats = Heartbeats(context, b"z" + bytes(16))
    heartbeats.set_pace(0.05, 0.1)
    yield heartbeats
    heartbeats.close()


def listening(context, endpoint):
    inbox = context.socket(zmq.ROUTER)
    inbox.linger, inbox.ipv6 = 0, "[" in endpoint
    inbox.bind(endpoint)
    return inbox, inbox.last_endpoint.decode()


def await_events(heartbeats, count=1):
    events = []
    deadline = time.monotonic() + PATIENCE
    while len(events) < count:
        events += heartbeats.events()
        assert time.monotonic() < deadline, f"expected {count} events, found {events}"
        time.sleep(0.005)  # as the I/O thread looks: now and then
    return events


def _has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.fixture(params=["ipc", "tcp", "tcp6"])
def endpoint(request, tmp_path):
    if request.param == "tcp6" and not _has_ipv6():
        pytest.skip("this system has no IPv6")
    return {
        "ipc": f"ipc://{tmp_path}/inbox",
        "tcp": "tcp://127.0.0.1:*",
        "tcp6": "tcp://[::1]:*",
    }[request.param]


def test_a_peer_answers_until_it_goes_and_when_it_is_back(context, heartbeats, endpoint):
    inbox, endpoint = listening(context, endpoint)
    heartbeats.watch(3, endpoint)
    assert await_events(heartbeats) == [(3, True)]
    # Nothing reads the inbox: the answers come from ZeroMQ itself.
    time.sleep(0.25)  # five intervals
    assert heartbeats.events() == []
    inbox.close()
    assert await_events(heartbeats) == [(3, False)]
    inbox, _ = listening(context, endpoint)
    assert (3, True) in await_events(heartbeats)
    inbox.close()


def test_a_peer_that_accepts_and_says_nothing_gives_no_sign(context, heartbeats, tmp_path):
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(f"{tmp_path}/mute")
        mute.listen()
        heartbeats.watch(1, f"ipc://{tmp_path}/mute")
        connection, _ = mute.accept()
        with connection:
            assert connection.recv(10)  # it has connected, and says its greeting
            # The attempt times out, as one to a process that is stopped does.
            assert await_events(heartbeats) == [(1, False)]


def test_peers_are_told_apart_and_forgotten(context, heartbeats, tmp_path):
    inboxes = [listening(context, f"ipc://{tmp_path}/{rank}") for rank in range(3)]
    for rank, (_, endpoint) in enumerate(inboxes):
        heartbeats.watch(rank, endpoint)
    assert sorted(await_events(heartbeats, 3)) == [(0, True), (1, True), (2, True)]
    heartbeats.forget(1)
    heartbeats.forget(1)
    heartbeats.forget(7)
    for inbox, _ in inboxes[:2]:
        inbox.close()
    assert await_events(heartbeats) == [(0, False)]
    inboxes[2][0].close()
    assert (2, False) in await_events(heartbeats)


def test_nothing_is_open_before_anybody_is_watched(context, heartbeats):
    assert heartbeats.events() == []
    heartbeats.forget(0)


# -- from another host -----------------------------------------------------------------------


def await_answer(probe):
    deadline = time.monotonic() + PATIENCE
    while probe.listening() is None and probe.pending:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return probe.listening()


def test_a_probe_tells_whether_anything_listens(no_leaks):
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        probe = ListenerProbe(endpoint)
        assert await_answer(probe) is True
        probe.close()
    probe = ListenerProbe(endpoint)
    assert await_answer(probe) is False
    probe.close()


def test_a_probe_without_an_answer_says_nothing(no_leaks):
    """A listener whose queue is full does not answer, as a network that is cut."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        fillers = [ListenerProbe(endpoint) for _ in range(4)]
        probe = ListenerProbe(endpoint)
        assert urlsplit(endpoint).port
        time.sleep(0.1)
        assert probe.listening() is None
        assert probe.pending
        for each in [*fillers, probe]:
            each.close()

"""The heartbeat connections: which events they report, and when."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.support.waiting import until
from tests.transport.breaking_relay import BreakingRelay
from zrpc.transport.curve import Curve, KeyPair, PeerKey
from zrpc.transport.heartbeat import Heartbeats
from zrpc.transport.identity import identity_of
from zrpc.transport.probes import ListenerProbe


@pytest.fixture
def context(no_leaks: None) -> Iterator[zmq.Context[Any]]:
    with zmq.Context() as context:
        yield context


@pytest.fixture
def heartbeats(context: zmq.Context[Any]) -> Iterator[Heartbeats]:
    heartbeats = Heartbeats(context, b"z" + bytes(16))
    heartbeats.set_pace(0.05, 0.1)
    yield heartbeats
    heartbeats.close()


def listening(context: zmq.Context[Any], endpoint: str) -> tuple[zmq.Socket[bytes], str]:
    inbox = context.socket(zmq.ROUTER)
    inbox.linger, inbox.ipv6 = 0, "[" in endpoint
    inbox.bind(endpoint)
    return inbox, inbox.last_endpoint.decode()


def await_events(heartbeats: Heartbeats, count: int = 1) -> list[tuple[int, bool]]:
    events: list[tuple[int, bool]] = []
    until(lambda: events.extend(heartbeats.events()) or len(events) >= count, f"{count} events")
    return events


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.fixture(params=["ipc", "tcp", "tcp6"])
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "tcp6" and not _has_ipv6():
        pytest.skip("this system has no IPv6")
    return {
        "ipc": f"ipc://{tmp_path}/inbox",
        "tcp": "tcp://127.0.0.1:*",
        "tcp6": "tcp://[::1]:*",
    }[request.param]


@pytest.mark.system
def test_a_peer_answers_until_it_closes_and_when_it_is_back(
    context: zmq.Context[Any], heartbeats: Heartbeats, endpoint: str
) -> None:
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


@pytest.mark.system
def test_a_handshake_that_breaks_without_a_word_is_tried_again_within_the_limit(
    context: zmq.Context[Any],
) -> None:
    """Not only once. The pace is that of the default limit of 10 s."""
    inbox, endpoint = listening(context, "tcp://127.0.0.1:*")
    heartbeats = Heartbeats(context, b"z" + bytes(16))
    heartbeats.set_pace(2.0, 4.0)
    with BreakingRelay(endpoint) as relay:
        for swallowed in (0, 2):
            relay.swallow(swallowed)
            if not swallowed:
                heartbeats.watch(3, relay.endpoint)
            found: list[tuple[int, bool]] = []
            until(lambda found=found: found.extend(heartbeats.events()) or (3, True) in found)
            # It broke, and twice it was not made.
            assert found == [(3, False)] * (swallowed and 3) + [(3, True)]
        until(lambda: not heartbeats.notices() and inbox.poll(0))
        heartbeats.forget(3)
    heartbeats.close()
    inbox.close()


def test_peers_that_refuse_the_key_at_first_are_tried_until_they_have_heard_of_it(
    context: zmq.Context[Any], heartbeats: Heartbeats
) -> None:
    """All of them: a connection that is made again once took the one of another peer with it."""
    keys, own_keys, peers = KeyPair.new(), KeyPair.new(), set(range(8))
    curve, own_curve = Curve(keys), Curve(own_keys)
    curve.open(context)
    inboxes = []
    for peer in peers:
        own_curve.admit(peer, PeerKey(keys.public, b"z" + bytes(16)))
        inboxes.append(context.socket(zmq.ROUTER))
        curve.guard_inbox(inboxes[-1])
        inboxes[-1].linger = 0
        inboxes[-1].bind("tcp://127.0.0.1:*")
        endpoint = inboxes[-1].last_endpoint.decode()
        heartbeats.watch(peer, endpoint, partial(own_curve.guard_mailbox, peer=peer))
    for _ in range(4):
        refused = await_events(heartbeats, len(peers))
        assert not any(answers for _, answers in refused)
    curve.admit(9, PeerKey(own_keys.public, b"y" + bytes(16)))
    reached: set[int] = set()
    until(
        lambda: reached.update(peer for peer, yes in heartbeats.events() if yes) or reached == peers
    )
    for inbox in inboxes:
        inbox.close()
    curve.close()


def test_events_name_the_peer_until_it_is_forgotten(
    context: zmq.Context[Any], heartbeats: Heartbeats, tmp_path: Path
) -> None:
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


def greeting_at(inbox: zmq.Socket[bytes], heartbeats: Heartbeats) -> list[bytes]:
    until(lambda: heartbeats.notices() or inbox.poll(0))
    return inbox.recv_multipart()


def test_each_connection_begins_with_a_greeting_which_the_peer_may_answer(
    context: zmq.Context[Any], heartbeats: Heartbeats, endpoint: str
) -> None:
    inbox, endpoint = listening(context, endpoint)
    heartbeats.watch(3, endpoint)
    greeting = greeting_at(inbox, heartbeats)
    assert identity_of(greeting[0]) == b"h" + bytes(16)
    assert greeting[1:] == [b""]
    inbox.send_multipart([greeting[0], b"h" + bytes(16), b"not by this connection"])
    inbox.send_multipart([greeting[0], greeting[0], b"a message"])
    found: list[tuple[int, bytes]] = []
    until(lambda: found.extend(heartbeats.notices()) or found)
    assert found == [(3, b"a message")]
    inbox.close()
    assert await_events(heartbeats, 2) == [(3, True), (3, False)]
    inbox, _ = listening(context, endpoint)
    assert greeting_at(inbox, heartbeats) == greeting
    inbox.close()


# -- from another host -----------------------------------------------------------------------


def await_answer(probe: ListenerProbe) -> bool | None:
    until(lambda: probe.listening() is not None or not probe.pending)
    return probe.listening()


def test_a_probe_reports_whether_anything_listens(no_leaks: None) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        for listens in (False, True):
            probe = ListenerProbe(endpoint)
            assert await_answer(probe) is listens
            probe.close()
            server.listen()


@pytest.mark.system
def test_a_probe_reports_nothing_until_there_is_an_answer(no_leaks: None) -> None:
    """A listener whose backlog is full does not answer, like an interrupted network."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as server, contextlib.ExitStack() as opened:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        for _ in range(2):
            opened.callback(ListenerProbe(endpoint).close)
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        for _ in range(1024):  # ``select`` takes no descriptor from 1024 on
            opened.callback(os.close, os.dup(server.fileno()))
        probe = ListenerProbe(endpoint)
        opened.callback(probe.close)
        time.sleep(0.1)
        assert probe.listening() is None
        assert probe.pending
        server.settimeout(0.01)

        def is_answered() -> bool | None:
            with contextlib.suppress(TimeoutError):
                opened.callback(server.accept()[0].close)
            return probe.listening()

        assert until(is_answered) is True

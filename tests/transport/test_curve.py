"""CURVE between members: who is admitted, and what an eavesdropper reads."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import zmq

from tests.support.waiting import SOON, until
from tests.transport.breaking_relay import BreakingRelay
from tests.transport.numbered import opened
from zrpc.transport import curve as curve_module
from zrpc.transport.chunks import MAX_FRAME_BYTES
from zrpc.transport.curve import Curve, KeyPair, PeerKey
from zrpc.transport.identity import NOBODY, identity_of
from zrpc.transport.network import BULK_BYTES, Network
from zrpc.transport.unix_stream import direct_path

pytestmark = pytest.mark.usefixtures("no_leaks")

# How long nothing must arrive from a stranger; a member takes some milliseconds.
QUIET = 0.1


def peer_keys(keys: Sequence[KeyPair]) -> list[PeerKey]:
    """The public keys of workers 0, 1, ..., with their identities."""
    return [PeerKey(pair.public, b"z%d" % rank) for rank, pair in enumerate(keys)]


def curve_of(own: KeyPair, keys: Sequence[KeyPair]) -> Curve:
    """One worker's keys, and those of all."""
    curve = Curve(own)
    for rank, key in enumerate(peer_keys(keys)):
        curve.admit(rank, key)
    return curve


class Meeting:
    """Networks that know each other's keys."""

    def __init__(self, count: int = 2, ipc: bool = False) -> None:
        self.keys = [KeyPair.new() for _ in range(count)]
        self.networks = [Network(b"z%d" % rank, rank, count, ipc) for rank in range(count)]
        self.endpoints = [
            network.listen_tcp("127.0.0.1", curve_of(keys, self.keys))
            for network, keys in zip(self.networks, self.keys, strict=True)
        ]
        for network in self.networks:
            network.connect(self.endpoints)

    def close(self) -> None:
        for network in self.networks:
            network.close(0, ())


@pytest.fixture
def guarded(no_leaks: None) -> Iterator[Meeting]:
    with contextlib.closing(Meeting()) as made:
        yield made


@pytest.fixture
def context(no_leaks: None) -> Iterator[zmq.Context[Any]]:
    with zmq.Context() as made:
        yield made


def received(network: Network, timeout: float = SOON) -> tuple[bytes, bytes, list[bytes]] | None:
    message = network.receive(timeout)
    if message is None:
        return None
    identity, first, buffers = message
    return identity, bytes(first), [bytes(buffer) for buffer in buffers]


def connected(
    context: zmq.Context[Any],
    endpoint: str,
    identity: bytes = b"z0",  # as a member that has not connected yet
    keys: KeyPair | None = None,
    server: str = "",
) -> zmq.Socket[bytes]:
    made = context.socket(zmq.DEALER)
    made.linger = 0
    if identity:
        made.routing_id = identity
    if keys is not None:
        made.curve_publickey = keys.public.encode()
        made.curve_secretkey = keys.secret
        made.curve_serverkey = server.encode()
    made.connect(endpoint)
    return made


def ask(intruder: zmq.Socket[bytes]) -> None:
    """Sends a message, unless the connection was refused already: then a send would wait."""
    with contextlib.suppress(zmq.Again):
        intruder.send(b"let me in", zmq.NOBLOCK)


@pytest.mark.system
def test_messages_of_strangers_do_not_arrive(
    guarded: Meeting, context: zmq.Context[Any], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = guarded.networks
    mine, server = KeyPair.new(), guarded.keys[1].public
    others: list[dict[str, Any]] = [
        {},
        {"keys": guarded.keys[0], "server": mine.public},
        # A member's public key, which is no secret, without its secret key.
        {"keys": KeyPair(guarded.keys[0].public, mine.secret), "server": server},
        {"keys": mine, "server": server},
        {"keys": mine, "server": server},  # not logged again so soon
    ]
    for number, keys in enumerate(others):
        assert caplog.text.count("with a key that is no member's") == (number == 4)
        with connected(context, guarded.endpoints[1], **keys) as intruder:
            ask(intruder)
            assert received(second, QUIET) is None
            first.send(1, b"member")
            assert received(second) == (b"z0", b"member", [])
            assert received(second, QUIET) is None
    assert caplog.text.count("refused 1 connection(s) with a key that is no member's") == 1
    assert "from 127.0.0.1" in caplog.text


def test_an_inbox_that_poses_as_a_peer_receives_nothing(
    guarded: Meeting, context: zmq.Context[Any]
) -> None:
    # Its endpoint has replaced worker 1's, but it can't have worker 1's key.
    posing = context.socket(zmq.ROUTER)
    with posing:
        posing.linger = 0
        keys = KeyPair.new()
        posing.curve_server, posing.curve_secretkey = True, keys.secret
        port = posing.bind_to_random_port("tcp://127.0.0.1")
        guarded.networks[0].connect([guarded.endpoints[0], f"tcp://127.0.0.1:{port}"])
        guarded.networks[0].send(1, b"for worker 1 only")
        assert not posing.poll(int(QUIET * 1000))


# -- a member that poses as another --------------------------------------------------------


@pytest.fixture
def meeting(no_leaks: None) -> Iterator[Meeting]:
    """Three workers; the last one attacks with what it knows itself."""
    with contextlib.closing(Meeting(3)) as made:
        yield made


def attacker(context: zmq.Context[Any], meeting: Meeting, identity: bytes) -> zmq.Socket[bytes]:
    """Connects to worker 1 as worker 2, which it is, under an identity of its choice."""
    server = meeting.keys[1].public
    return connected(context, meeting.endpoints[1], identity, meeting.keys[2], server)


def senders(network: Network, count: int) -> list[tuple[bytes, bytes]]:
    """The identities and first frames of the next messages."""
    found = []
    for _ in range(count):
        message = received(network)
        assert message is not None
        found.append(message[:2])
    return found


def test_what_a_member_sends_under_the_identity_of_another_is_its_own(
    meeting: Meeting, context: zmq.Context[Any]
) -> None:
    victim = meeting.networks[1]
    for letter in (b"z", b"b"):
        with attacker(context, meeting, letter + b"0") as posing:
            posing.send(b"small")
            posing.send_multipart([b"large", b"x" * 100_000, b"more"])
            assert senders(victim, 2) == [(letter + b"2", b"small"), (letter + b"2", b"large")]
    for identity in (b"h0", b"h0.random", b"h", b""):
        with attacker(context, meeting, identity) as posing:
            posing.send(b"")
            [(sender, _)] = senders(victim, 1)
            assert sender == (NOBODY if identity else b"\x002")  # libzmq makes an id after a zero


@pytest.mark.parametrize("letter", [b"z", b"b"])
def test_a_member_on_tcp_cannot_cut_off_a_neighbour(
    context: zmq.Context[Any], letter: bytes
) -> None:
    """Nor pose as it. No connection breaks that messages of a neighbour are in flight on."""
    with contextlib.closing(Meeting(3, ipc=True)) as meeting:
        neighbour, victim = meeting.networks[:2]
        endpoint = f"ipc://{victim.directory.socket_path}"
        direct_path(endpoint).unlink()  # then ZeroMQ carries small messages, too
        neighbour.connect(["", endpoint])
        message = b"x" * (BULK_BYTES if letter == b"b" else 1)
        neighbour.send(1, message)
        assert senders(victim, 1) == [(letter + b"0", message)]
        boxes = neighbour._bulk if letter == b"b" else neighbour._mailboxes
        with boxes[1]._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) as broken:
            for _ in range(3):
                with attacker(context, meeting, letter + b"0") as posing:
                    posing.send(b"as worker 0")
                    assert senders(victim, 1) == [(letter + b"2", b"as worker 0")]
                    neighbour.send(1, message)
                    assert senders(victim, 1) == [(letter + b"0", message)]
            assert not broken.poll(0)


def greeted(watched: Network, watching: Network) -> tuple[bytes, bytes, list[bytes]] | None:
    assert watching.heartbeats.notices() == []  # ZeroMQ sends the greetings meanwhile
    return received(watched, 0.01)


def test_a_member_cannot_answer_heartbeats_as_another(meeting: Meeting) -> None:
    """A notice is known by the connection on which it comes, whatever is written in it."""
    watching = meeting.networks[0]
    watching.heartbeats.set_pace(0.5, 5.0)
    for peer in (1, 2):
        watching.watch(peer)
    greetings = {}
    for peer in (1, 2):
        greeting = until(lambda peer=peer: greeted(meeting.networks[peer], watching))
        identity = greeting[0]
        assert identity_of(identity) == b"h0"
        greetings[peer] = identity
    # Worker 2 answers its own connection in all ways that name worker 1.
    for frames in ([b"z1", b"posing"], [b"h1", b"posing"], [b"h0", b"posing"]):
        meeting.networks[2].inbox.answer(greetings[2], frames)
    meeting.networks[2].answer_heartbeats(greetings[2], b"true")
    meeting.networks[1].answer_heartbeats(greetings[1], b"true")
    found: list[tuple[int, bytes]] = []
    until(lambda: found.extend(watching.heartbeats.notices()) or len(found) >= 2)
    assert sorted(found) == [(1, b"true"), (2, b"true")]


@pytest.mark.system
def test_keys_can_be_admitted_and_dismissed(context: zmq.Context[Any]) -> None:
    keys = [KeyPair.new() for _ in range(2)]
    curves = [curve_of(key, keys) for key in keys]

    def reaches(port: int, within: float) -> bool:
        with context.socket(zmq.DEALER) as mailbox:
            mailbox.linger = 0
            curves[1].guard_mailbox(mailbox, 0)
            mailbox.connect(f"tcp://127.0.0.1:{port}")
            mailbox.sndtimeo = int(within * 1000)
            try:
                mailbox.send(b"a message")
            except zmq.Again:  # it was refused already
                return False
            if not inbox.poll(int(within * 1000)):
                return False
            inbox.recv_multipart()
            return True

    with context.socket(zmq.ROUTER) as inbox:
        inbox.linger = 0
        curves[0].guard_inbox(inbox)
        port = inbox.bind_to_random_port("tcp://127.0.0.1")
        assert not reaches(port, QUIET)  # nobody is admitted without an authenticator
        curves[0].open(context)
        assert reaches(port, SOON)
        curves[0].admit(1, PeerKey(KeyPair.new().public, peer_keys(keys)[1].identity))
        assert not reaches(port, QUIET)  # another key takes the place of a peer's
        curves[0].admit(1, peer_keys(keys)[1])
        assert reaches(port, SOON)
        curves[0].dismiss(1)
        assert not reaches(port, QUIET)
    curves[0].close()


def test_a_gatekeeper_whose_thread_has_died_can_be_closed(context: zmq.Context[Any]) -> None:
    curve = Curve(KeyPair.new())
    curve.open(context)
    authenticator = curve._authenticator
    authenticator.pipe.send(b"TERMINATE")
    authenticator.thread.join(SOON)
    assert not authenticator.is_alive()
    curve.close()


def test_the_secret_key_is_not_shown() -> None:
    keys = KeyPair.new()
    assert keys.secret.decode() not in repr(keys)
    assert len(keys.public) == 40


# -- before a connection has authenticated -------------------------------------------------

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)


def connection(endpoint: str) -> socket.socket:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    made = socket.create_connection((host, int(port)), SOON)
    made.settimeout(SOON)
    return made


def closed_after(made: socket.socket) -> float:
    """Returns the seconds until the other side closes the connection."""
    begun = time.monotonic()
    with contextlib.suppress(ConnectionError):
        while made.recv(4096):
            pass
    return time.monotonic() - begun


@pytest.mark.system
def test_a_connection_without_a_handshake_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curve_module, "_HANDSHAKE_MS", 300)
    with contextlib.closing(Meeting()) as guarded:
        for first in (b"", GREETING, GREETING + b"\x06" + struct.pack(">Q", 200)):
            with connection(guarded.endpoints[0]) as silent:
                silent.sendall(first)
                assert 0.1 < closed_after(silent) < SOON


def test_a_frame_above_the_limit_closes_the_connection_at_once(guarded: Meeting) -> None:
    for size in (MAX_FRAME_BYTES + 1, 2**40, 2**63 - 1, 2**64 - 1):
        with connection(guarded.endpoints[0]) as greedy:
            greedy.sendall(GREETING + b"\x06" + struct.pack(">Q", size))
            assert closed_after(greedy) < 2  # at once, before the handshake times out
    guarded.networks[1].send(0, b"still there")
    assert received(guarded.networks[0]) == (b"z1", b"still there", [])


# -- eavesdroppers --------------------------------------------------------------------------


@pytest.mark.system
@pytest.mark.parametrize("in_the_clear", [True, False])
def test_an_eavesdropper_reads_nothing(in_the_clear: bool) -> None:
    keys = [KeyPair.new() for _ in range(2)]
    curves = [None if in_the_clear else curve_of(k, keys) for k in keys]
    with opened(ipc=False) as networks:
        endpoints = [n.listen_tcp("127.0.0.1", c) for n, c in zip(networks, curves, strict=True)]
        with BreakingRelay(endpoints[1]) as tap:
            networks[0].connect([endpoints[0], tap.endpoint])
            networks[1].connect(endpoints)
            networks[0].send(1, b"a word to hide", [b"and another" * 1000])
            assert received(networks[1])[1] == b"a word to hide"
            assert (b"a word to hide" in tap.heard) is in_the_clear
            assert (b"and another" in tap.heard) is in_the_clear

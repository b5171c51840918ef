"""The connections that tell a worker that its peers live, whatever these are doing.

ZeroMQ's own heartbeats (ZMTP's PING and PONG) are answered by libzmq's I/O thread, even while
Python holds the interpreter's lock for minutes. They have connections of their own. On a mailbox's
connection, a PING would wait behind what is being sent, and its time-out would begin only when it
has left. A peer that is stopped in the middle of a large message would not be noticed, and on a
slow network a healthy peer could be declared dead (libzmq issue 2709). For the same reason, the
time to live that a PING can request of the other side (ZMQ_HEARTBEAT_TTL) is not used: each side
checks the other one itself.

An answered heartbeat shows that a peer lives and can be reached, but not that the peer reaches this
worker, or still counts it as a member. So each new connection begins with an empty message, a
*greeting*, which ZeroMQ sends by itself. A peer that has declared this worker dead answers it by
the same connection, with a *notice*. That arrives even if the peer itself can't connect to this
worker, and at a process that was stopped: it reads the notice, or connects again, when it goes on.
Each connection has a routing id of its own, which only its two ends know. A notice repeats it, so
no peer can send one that seems to be from another.

A connection may break in its handshake without a word. So the handshake has a limit, short enough
for a second and a third try within the time that a peer may be silent. On a busy machine a
handshake takes longer, and to begin it again costs the work that was done. So after each try that
fails, the next one has twice the time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from zrpc.transport.identity import heartbeat_identity, random_routing_id

# The interval of attempts to reconnect, so a peer that resumes is noticed soon.
_RECONNECT_MS = 100
# The first and the longest limit of a handshake: parts of an interval and a timeout together.
_HANDSHAKE = 1 / 6
_MAX_HANDSHAKE = 4
# A busy machine takes this long.
_MIN_HANDSHAKE_MS = 500
_MAX_MS = (1 << 30) - 1  # ZeroMQ takes an int, and the sum of two of these is one, too


@dataclass(slots=True)
class _Connection:
    """The connection to one peer.

    Attributes:
        endpoint: of the peer's inbox.
        guard: makes it succeed with that peer only.
        handshake_ms: the limit of its handshake.
        made_ms: the limit that it was made with, which is fixed.
        routing_id: what its greeting shows.
        stands: whether the peer answers.
    """

    endpoint: str
    guard: Callable[[zmq.Socket[Any]], None] | None
    handshake_ms: int
    made_ms: int = 0
    routing_id: bytes = b""
    stands: bool = False


class Heartbeats:
    """One DEALER socket that sends nothing but heartbeats and greetings, to all watched peers.

    Args:
        context: the context of all of the worker's sockets.
        identity: the identity of the worker's mailboxes. Here its first letter is replaced, so that
            the inbox of a peer can tell the two apart.

    For one thread at a time, the one that receives. `close` may be called when none does.
    """

    def __init__(self, context: zmq.Context[Any], identity: bytes) -> None:
        self._context = context
        self._identity = heartbeat_identity(identity)
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._connections: dict[int, _Connection] = {}
        self._peers: dict[str, int] = {}  # by their endpoints
        # See `set_pace`.
        self._interval_ms = 0
        self._timeout_ms = 0
        self._first_handshake_ms = self._max_handshake_ms = _MIN_HANDSHAKE_MS

    def set_pace(self, interval: float, timeout: float) -> None:
        """Sets how often a peer is sent a PING, and how long it may take to answer, in seconds.

        Must be called before the first `watch`.
        """
        self._interval_ms = min(max(1, int(interval * 1000)), _MAX_MS)
        self._timeout_ms = min(max(1, int(timeout * 1000)), _MAX_MS)
        both = self._interval_ms + self._timeout_ms
        self._first_handshake_ms = min(max(_MIN_HANDSHAKE_MS, int(_HANDSHAKE * both)), _MAX_MS)
        self._max_handshake_ms = min(max(_MIN_HANDSHAKE_MS, _MAX_HANDSHAKE * both), _MAX_MS)

    def watch(
        self, peer: int, endpoint: str, guard: Callable[[zmq.Socket[Any]], None] | None = None
    ) -> None:
        """Begins to send heartbeats to a peer, at the endpoint of its inbox; see `Mailbox`.

        No other peer at this endpoint may be watched: the events of both look the same.

        Raises:
            zmq.ZMQError: there are no descriptors left.
        """
        connection = _Connection(endpoint, guard, self._first_handshake_ms)
        self._connect(connection)
        self._connections[peer] = connection
        self._peers[endpoint] = peer

    def _connect(self, connection: _Connection) -> None:
        socket = self._open_socket()
        # A connection has the options that the socket has when it is made. With IPv6, ZeroMQ would
        # report an IPv4 address under another name when it reconnects.
        socket.ipv6 = "[" in connection.endpoint
        socket.curve_server = False  # no keys unless the guard sets some
        socket.routing_id = connection.routing_id = random_routing_id(self._identity)
        socket.handshake_ivl = connection.handshake_ms
        if connection.guard is not None:
            connection.guard(socket)
        socket.connect(connection.endpoint)
        connection.made_ms = connection.handshake_ms

    def _disconnect(self, connection: _Connection) -> None:
        # A connection that could not be made again does not exist.
        with contextlib.suppress(zmq.ZMQError):
            self._open_socket().disconnect(connection.endpoint)

    def peer_at(self, endpoint: str) -> int | None:
        """Returns the peer that is watched at an endpoint; None if there is none."""
        return self._peers.get(endpoint)

    def forget(self, peer: int) -> None:
        """Stops the heartbeats to a peer, if it is watched."""
        connection = self._connections.pop(peer, None)
        if connection is not None:
            del self._peers[connection.endpoint]
            self._disconnect(connection)

    def events(self) -> list[tuple[int, bool]]:
        """Returns the events since the last call, in order: a peer, and whether it answers now.

        If it does not, its connection has broken or timed out.
        """
        events: list[tuple[int, bool]] = []
        while self._monitor is not None:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                break
            peer = self._peers.get(event["endpoint"].decode())
            if peer is not None and self._take_event(peer, event["event"]):
                events.append((peer, self._connections[peer].stands))
        self._remake_connections()
        return events

    def _take_event(self, peer: int, event: int) -> bool:
        """Notes an event of a connection; returns whether it means something to the caller."""
        connection = self._connections[peer]
        stood, connection.stands = connection.stands, event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if event == zmq.EVENT_CONNECT_RETRIED:
            # If it stood, its handshake had succeeded just when it was made again.
            return stood
        if event == zmq.EVENT_DISCONNECTED:
            limit = min(2 * connection.handshake_ms, self._max_handshake_ms)
            connection.handshake_ms = self._first_handshake_ms if stood else limit
        return True

    def _remake_connections(self) -> None:
        """Makes connections again whose handshakes need another limit."""
        for connection in self._connections.values():
            if connection.handshake_ms != connection.made_ms and not connection.stands:
                self._disconnect(connection)
                with contextlib.suppress(zmq.ZMQError):  # no memory: it is tried again
                    self._connect(connection)

    def notices(self) -> list[tuple[int, bytes]]:
        """Returns what peers have answered since the last call: the peer, and a message.

        Must be called often, like `events`: ZeroMQ sends the greetings meanwhile.
        """
        notices: list[tuple[int, bytes]] = []
        peers = {each.routing_id: peer for peer, each in self._connections.items()}
        while self._socket is not None:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            peer = peers.get(frames[0])
            if peer is not None and len(frames) == 2:
                notices.append((peer, frames[1]))
        return notices

    def close(self) -> None:
        """Closes the connections."""
        if self._socket is not None and self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=0)

    def _open_socket(self) -> zmq.Socket[bytes]:
        if self._socket is not None:
            return self._socket
        monitor = self._context.socket(zmq.PAIR)
        try:
            socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        except zmq.ZMQError:
            monitor.close()
            raise
        socket.linger = 0
        # A greeting for each connection, as soon as it stands.
        socket.probe_router = True
        socket.immediate = True
        socket.heartbeat_ivl = self._interval_ms
        socket.heartbeat_timeout = self._timeout_ms
        socket.reconnect_ivl = _RECONNECT_MS
        socket.connect_timeout = self._timeout_ms
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
        address = f"inproc://zrpc-heartbeats-{id(self)}"
        socket.monitor(address, events)
        # No limit: otherwise libzmq's I/O thread would wait for room, and answer nobody meanwhile.
        monitor.rcvhwm = 0
        monitor.connect(address)
        self._socket, self._monitor = socket, monitor
        return socket

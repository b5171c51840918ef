"""The connections by which a worker knows that its peers live, whatever these are doing.

ZeroMQ's own heartbeats (ZMTP's PING and PONG) are answered by libzmq's I/O thread: also while
Python holds the interpreter's lock for minutes. They go through connections on which nothing
else travels. On a mailbox, a PING waits behind what is being sent, and its time-out begins only
when it has left: a peer that is stopped in the midst of a large message would not be noticed, and
on a slow network one that is well could be taken for dead (libzmq issue 2709). So the time to
live that a PING can ask of the other side (ZMQ_HEARTBEAT_TTL) is not used either: each side looks
for itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

__all__ = ["Heartbeats"]

# How often to connect anew, in milliseconds: a peer that goes on is to be seen soon.
_RECONNECT_MS = 100
_LONGEST_MS = (1 << 30) - 1  # ZeroMQ takes an int, and the sum of two is one, too


class Heartbeats:
    """One DEALER socket that sends nothing but heartbeats, to all peers that are watched.

    Args:
        context: the agent's.
        identity: the worker's token, after a letter of the mailboxes'; here it follows another, so
            that a peer's inbox can tell the two apart.

    For one thread at a time: that which receives. `close` is for when no other does any more.
    """

    def __init__(self, context: zmq.Context[Any], identity: bytes) -> None:
        self._context = context
        self._identity = b"h" + identity[1:]
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._endpoints: dict[int, str] = {}
        self._ranks: dict[str, int] = {}
        # In milliseconds, see `set_pace`.
        self._interval = 0
        self._timeout = 0

    def set_pace(self, interval: float, timeout: float) -> None:
        """Says how often a peer is asked, and how long it may take to answer, in seconds.

        To be called before the first `watch`.
        """
        self._interval = min(max(1, int(interval * 1000)), _LONGEST_MS)
        self._timeout = min(max(1, int(timeout * 1000)), _LONGEST_MS)

    def watch(
        self,
        rank: int,
        endpoint: str,
        guard: Callable[[zmq.Socket[Any]], None] | None = None,
    ) -> None:
        """Begins to ask a peer.

        Args:
            rank: the peer's.
            endpoint: its inbox.
            guard: makes the socket's next connection one to that peer only, see `Mailbox`.

        Raises:
            zmq.ZMQError: there are no descriptors left.
        """
        socket = self._opened()
        # Each connection has the options of the moment it is made at. With IPv6, ZeroMQ would call
        # an IPv4 address by another name when it connects anew.
        socket.ipv6 = "[" in endpoint
        socket.curve_server = False  # no keys, until the guard gives some
        if guard is not None:
            guard(socket)
        socket.connect(endpoint)
        self._endpoints[rank] = endpoint
        self._ranks[endpoint] = rank

    def forget(self, rank: int) -> None:
        """Asks a peer no more; nothing happens where it isn't watched."""
        endpoint = self._endpoints.pop(rank, None)
        if endpoint is not None and self._socket is not None:
            del self._ranks[endpoint]
            self._socket.disconnect(endpoint)

    def events(self) -> list[tuple[int, bool]]:
        """What has happened since the last call, in order: the peer's rank, and whether it
        answers now (true), or its connection has broken or timed out (false).
        """
        events: list[tuple[int, bool]] = []
        while self._monitor is not None:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                break
            rank = self._ranks.get(event["endpoint"].decode())
            if rank is not None:
                events.append((rank, event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED))
        return events

    def close(self) -> None:
        """Closes the connections."""
        if self._socket is not None and self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=0)

    def _opened(self) -> zmq.Socket[bytes]:
        if self._socket is not None:
            return self._socket
        monitor = self._context.socket(zmq.PAIR)
        try:
            socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        except zmq.ZMQError:
            monitor.close()
            raise
        socket.linger = 0
        socket.routing_id = self._identity
        socket.heartbeat_ivl = self._interval
        socket.heartbeat_timeout = self._timeout
        socket.reconnect_ivl = _RECONNECT_MS
        socket.connect_timeout = self._timeout
        socket.handshake_ivl = self._interval + self._timeout
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        address = f"inproc://zrpc-heartbeats-{id(self)}"
        socket.monitor(address, events)
        # Without a limit: libzmq's I/O thread would wait for room, and answer nobody meanwhile.
        monitor.rcvhwm = 0
        monitor.connect(address)
        self._socket, self._monitor = socket, monitor
        return socket

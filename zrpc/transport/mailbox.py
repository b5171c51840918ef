"""The sockets that a worker sends on, one for each peer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from zrpc.transport.chunks import CHUNK, broken_off, chunks

__all__ = ["Mailbox", "size_of"]


# After so many seconds of silence the system asks the other side, so often, so many times.
_KEEPALIVE_IDLE = 60
_KEEPALIVE_INTERVAL = 10
_KEEPALIVE_COUNT = 6


class Mailbox:
    """A DEALER socket that only sends, to one peer.

    ZeroMQ sockets are not thread-safe but may move between threads behind a full memory
    fence, which the mutex is: so any thread sends directly, without waking another.

    The bytes are copied when they are sent. What the caller does with a tensor afterwards
    does not change what arrives, and no thread of pyzmq's has to watch over lent memory.

    Args:
        context: the agent's.
        identity: the sender's token, by which the peer's inbox knows whose message it is.
        endpoint: the peer's inbox.
        guard: makes the socket connect to that peer and to nobody else, see `Curve`.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        identity: bytes,
        endpoint: str,
        guard: Callable[[zmq.Socket[Any]], None] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._in_chunks = endpoint.startswith("tcp://")
        # Held for one send at a time; guards the socket, `sent` and `_cut`.
        self._mutex = threading.Lock()
        self._socket = context.socket(zmq.DEALER)
        self._socket.routing_id = identity
        # What calls have under way bounds the queue, see Window; a limit on messages here
        # would drop answers or block the I/O thread.
        self._socket.sndhwm = 0
        self._socket.linger = 0
        self._socket.ipv6 = "[" in endpoint
        if self._in_chunks:
            # So that no firewall forgets the connection while nothing is sent: it would lose what
            # comes next. One that was forgotten all the same is made anew.
            self._socket.tcp_keepalive = 1
            self._socket.tcp_keepalive_idle = _KEEPALIVE_IDLE
            self._socket.tcp_keepalive_intvl = _KEEPALIVE_INTERVAL
            self._socket.tcp_keepalive_cnt = _KEEPALIVE_COUNT
        if guard is not None:
            guard(self._socket)
        self._socket.connect(endpoint)
        self._cut = 0  # how many messages went in chunks
        self.sent = 0

    def send(self, first: bytes, buffers: Sequence[Any] = (), counted: bool = True) -> None:
        """Sends one message; never blocks for the peer.

        Not to be interrupted by an exception (Ctrl-C), see `zrpc.interrupts`: half of a message
        may be sent, or one that is not counted.

        Args:
            first: the first frame.
            buffers: the other frames, anything with the buffer interface.
            counted: whether `sent` counts it.

        Raises:
            zmq.ZMQError: the mailbox is closed, or the system has no memory for the message.
        """
        with self._mutex:
            if not buffers and len(first) <= CHUNK:
                self._socket.send(first)
            elif self._in_chunks and size_of(first, buffers) > CHUNK:
                self._send_chunks(first, buffers, counted)
            else:
                self._send_parts([first, *buffers], counted)
            self.sent += counted

    def _send_chunks(self, first: bytes, buffers: Sequence[Any], counted: bool) -> None:
        """Sends a message in chunks; where that fails in its midst, the peer is told so.

        Then it tells whoever waits for an answer, and counts the message.
        """
        self._cut += 1
        try:
            for chunk in chunks(self._cut, [first, *buffers]):
                self._send_parts(chunk, counted=False)
        except zmq.ZMQError:
            if not self._socket.closed:
                self._socket.send(broken_off(self._cut, first))
                self.sent += counted
            raise

    def _send_parts(self, parts: Sequence[Any], counted: bool) -> None:
        """Sends a multipart message; where that fails in its midst, it ends there.

        Else the next message would go on with it. The peer finds that it is too short, says so
        where somebody waits for an answer, and counts it.
        """
        begun = False
        try:
            for part in parts[:-1]:
                self._socket.send(part, zmq.SNDMORE)
                begun = True
            self._socket.send(parts[-1])
        except zmq.ZMQError:
            if begun and not self._socket.closed:
                self._socket.send(b"")
                self.sent += counted
            raise

    def close(self, linger: float) -> None:
        """Closes the socket; what is queued has ``linger`` seconds to leave."""
        with self._mutex:
            self._socket.close(linger=int(linger * 1000))


def size_of(first: bytes, buffers: Sequence[Any]) -> int:
    """How many bytes a message has, all frames together."""
    return len(first) + sum(memoryview(buffer).nbytes for buffer in buffers)

"""The ZeroMQ sockets that a worker sends on, each to one peer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from zrpc.runtime.interrupts import uninterrupted
from zrpc.transport.chunks import CHUNK_BYTES, abort_chunk, chunks
from zrpc.transport.identity import random_routing_id

# TCP keepalive: the first probe after this time without traffic, then at this interval.
_KEEPALIVE_IDLE_SECONDS = 60
_KEEPALIVE_INTERVAL_SECONDS = 10
_KEEPALIVE_PROBES = 6
# The handshake begins again after this time, since what was sent for it may be lost without a word.
# It takes 2 ms, but longer on a machine that is busy with many others. Begun again, their work
# would be lost, so this is not short.
_HANDSHAKE_MS = 5_000


class Mailbox:
    """A DEALER socket that only sends, to one peer.

    ZeroMQ sockets are not thread-safe, but may move between threads behind a full memory
    fence. The mutex is one, so any thread sends directly, without waking another.

    The bytes are copied when they are sent. So the caller may change a tensor afterwards, and no
    thread of pyzmq has to track lent memory.

    Args:
        context: the context of all of the worker's sockets.
        identity: the sender's; the peer's inbox recognizes its messages by it.
        endpoint: the peer's inbox.
        guard: makes the socket's connections succeed with that peer only, see `Curve`.

    Attributes:
        way: how the messages travel: ``"tcp"``, ``"ipc"`` or ``"inproc"``.
        sent: the number of counted messages that were sent.
        sent_bytes: the size of all messages that were sent, in bytes.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        identity: bytes,
        endpoint: str,
        guard: Callable[[zmq.Socket[Any]], None] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.way = endpoint.partition("://")[0]
        # Held for one message at a time; guards the socket, the counts and `_chunked`.
        self._mutex = threading.Lock()
        self._socket = context.socket(zmq.DEALER)
        self._socket.routing_id = random_routing_id(identity)
        # No high-water mark: it would drop answers or block the receiving thread. The caller limits
        # the bytes in flight instead.
        self._socket.sndhwm = 0
        self._socket.linger = 0
        self._socket.ipv6 = "[" in endpoint
        if self.way == "tcp":
            # Otherwise a firewall may forget an idle connection and drop the next message. If it
            # does so regardless, the connection is made again.
            self._socket.tcp_keepalive = 1
            self._socket.tcp_keepalive_idle = _KEEPALIVE_IDLE_SECONDS
            self._socket.tcp_keepalive_intvl = _KEEPALIVE_INTERVAL_SECONDS
            self._socket.tcp_keepalive_cnt = _KEEPALIVE_PROBES
            self._socket.handshake_ivl = _HANDSHAKE_MS
        if guard is not None:
            guard(self._socket)
        self._socket.connect(endpoint)
        self._chunked = 0  # messages sent in chunks
        self.sent = self.sent_bytes = 0

    def transmit(self, first: bytes, buffers: Sequence[Any] = (), counted: bool = True) -> None:
        """Sends one message; never blocks for the peer.

        No signal handler may interrupt it, see `zrpc.runtime.interrupts`: if it raised, a message
        could be sent in part, or without being counted.

        Args:
            first: the first frame.
            buffers: the other frames, anything with the buffer interface.
            counted: whether `sent` counts it.

        Raises:
            zmq.ZMQError: the mailbox is closed, or the system has no memory for the message.
        """
        with self._mutex:
            if not buffers and len(first) <= CHUNK_BYTES:
                self._socket.send(first)
            elif self.way == "tcp" and size_of(first, buffers) > CHUNK_BYTES:
                self._transmit_chunks(first, buffers, counted)
            else:
                self._transmit_frames([first, *buffers], counted)
            self.sent += counted
            self.sent_bytes += size_of(first, buffers) if buffers else len(first)

    def _transmit_chunks(self, first: bytes, buffers: Sequence[Any], counted: bool) -> None:
        """Sends a message in chunks; if that fails halfway, tells the peer.

        The peer then fails the call that waits for an answer, and counts the message.
        """
        self._chunked += 1
        try:
            for chunk in chunks(self._chunked, [first, *buffers]):
                self._transmit_frames(chunk, counted=False)
        except zmq.ZMQError:
            if not self._socket.closed:
                self._socket.send(abort_chunk(self._chunked, first))
                self.sent += counted
            raise

    def _transmit_frames(self, frames: Sequence[Any], counted: bool) -> None:
        """Sends a multipart message; if that fails halfway, ends the message there.

        Otherwise the next message would continue it. The peer finds that it is too short, fails
        the call that waits for an answer, and counts the message.
        """
        begun = False
        try:
            for frame in frames[:-1]:
                self._socket.send(frame, zmq.SNDMORE)
                begun = True
            self._socket.send(frames[-1])
        except zmq.ZMQError:
            if begun and not self._socket.closed:
                self._socket.send(b"")
                self.sent += counted
            raise

    def close(self, linger: float) -> None:
        """Closes the socket; queued messages have ``linger`` seconds to be sent."""
        with uninterrupted, self._mutex:
            self._socket.close(linger=int(linger * 1000))


def size_of(first: bytes, buffers: Sequence[Any]) -> int:
    """Returns the size of a message in bytes, all frames together."""
    return len(first) + sum(memoryview(buffer).nbytes for buffer in buffers)

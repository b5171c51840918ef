"""The sockets that a worker receives on."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import zmq

from zrpc.runtime.adaptive_spin import MAX_SPIN_SECONDS, AdaptiveSpin
from zrpc.runtime.run_queue import running_threads
from zrpc.transport.chunks import BEGINS_CHUNK, MAX_FRAME_BYTES, remnant
from zrpc.transport.curve import Curve
from zrpc.transport.identity import HEARTBEAT_LETTER, NOBODY, identity_of
from zrpc.transport.poller import Poller
from zrpc.transport.unix_stream import BACKLOG, DirectInbox, Received, direct_path

# Of more routing ids, each message is checked. A member could use ever new ones.
_MAX_SENDERS = 1 << 16
# Some handshakes fail in a healthy mesh too. Each of them has left a megabyte at most.
_MANY_STRANGERS = 16
# To give memory back costs time, and the first use of other memory afterwards, too.
_STRANGERS_PAUSE_SECONDS = 10.0
_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def _own_identity(frame: zmq.Frame) -> bytes | None:
    """Returns the routing id that the sender of a frame connected with, or None if it had none.

    When a sender has reconnected, ZeroMQ gives the old connection an id of its own, which begins
    with a zero byte. Messages of the old connection may still be unread.
    """
    try:
        return str(frame.get("Identity")).encode()
    except (zmq.ZMQError, UnicodeDecodeError):
        return None


class Inbox:
    """A ROUTER socket, and the direct connections; for one thread at a time.

    It only receives, except that `answer` sends on what peers use to see whether this worker lives.

    Args:
        context: the context of all of the worker's sockets.

    Attributes:
        poller: waits for all of them; what is `at_hand` or `unread` does not end its `wait`.
        at_hand: the messages of direct connections that `receive` has not returned yet.
        unread: whether the ROUTER socket may have a message.
        received_bytes: the size of all messages that came by the ROUTER socket, in bytes.
    """

    def __init__(self, context: zmq.Context[Any]) -> None:
        self._context = context
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.rcvhwm = 0
        # A peer whose connection has broken reconnects. Its messages must be read even if the old
        # connection still seems to exist. Its routing id is a secret of the mesh.
        self._socket.router_handover = True
        self._socket.backlog = BACKLOG
        self.received_bytes = 0
        # Senders by routing ids that nobody can guess but their two ends. So such an id needs to be
        # checked only once.
        self._senders: dict[bytes, bytes] = {}
        self.poller = Poller()
        self.poller.watch_readable(self._socket.getsockopt(zmq.FD), self._mark_unread)
        self._direct: DirectInbox | None = None
        self._strangers: _Strangers | None = None
        self.at_hand: deque[Received] = deque()
        # Its descriptor reports only changes, so the socket must be read until it is empty.
        self.unread = True
        self._spin = AdaptiveSpin(os.cpu_count() or 1)
        self.inproc = f"inproc://zrpc-inbox-{id(self)}"
        self._socket.bind(self.inproc)

    def bind_ipc(self, path: Path) -> str:
        """Listens on a Unix socket at ``path``, and for direct connections next to it.

        Returns:
            The endpoint of the Unix socket.
        """
        endpoint = f"ipc://{path}"
        self._socket.bind(endpoint)
        self._direct = DirectInbox(direct_path(endpoint), self.poller, self.at_hand.append)
        return endpoint

    def listen_again(self) -> None:
        """Accepts direct connections again, after a lack of descriptors."""
        if self._direct is not None:
            self._direct.listen()

    def bind_tcp(self, address: str, curve: Curve | None, ports: range | None = None) -> str:
        """Listens on a free port of one interface; returns the endpoint.

        The options set here hold for endpoints bound from now on, not for the Unix socket.

        Args:
            address: the interface's name or address.
            curve: the keys for all connections; None if they are not encrypted.
            ports: the ports to choose from; None for all.

        Raises:
            zmq.ZMQError: there is no such interface, or no free port.
        """
        self._socket.maxmsgsize = MAX_FRAME_BYTES
        if self._strangers is None:
            self._strangers = _Strangers(self._context, self._socket)
        if curve is not None:
            curve.guard_inbox(self._socket)
        if ":" in address:
            self._socket.ipv6 = True
            address = f"[{address}]"
        for port in ("*",) if ports is None else ports:
            try:
                self._socket.bind(f"tcp://{address}:{port}")
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE:
                    raise
            else:
                endpoint: str = self._socket.last_endpoint.decode().rstrip("\0")
                return endpoint
        raise zmq.ZMQError(zmq.EADDRINUSE)

    def receive(self, timeout: float, spin: bool = False) -> Received | None:
        """Waits for a message. No exception may interrupt it, see `zrpc.runtime.interrupts`.

        Args:
            timeout: seconds, rounded up to milliseconds. If it is 0, it does not wait.
            spin: whether to poll before the thread sleeps, if messages have been arriving soon; it
                may take longer than the timeout. Waking a sleeping thread takes 10 to 20 us if its
                core sleeps, too. A message of ZeroMQ wakes several threads.

        Returns:
            The sender's identity, the first frame and the buffers; None if the timeout passed
            first, or if ZeroMQ has announced a message that it does not have.
        """
        messages = self.at_hand
        if messages:
            return messages.popleft()
        begun = now = monotonic()
        if timeout and now >= self._spin.next_look:
            self._spin.looked(running_threads(), now)
        awake = now + MAX_SPIN_SECONDS if spin and timeout > 0 and self._spin.polls else now
        while True:
            spinning = now < awake
            if spinning and self._direct is None:
                self.unread = True  # to ask the socket itself is faster
            else:
                left = 0 if spinning or self.unread else max(0.0, begun + timeout - now)
                self.poller.poll(left)
            if self.unread:
                self.unread = self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN != 0
            if self.unread or messages:
                break
            if spinning:
                os.sched_yield()
            now = monotonic()
            if now >= begun + timeout and now >= awake:
                break
        if timeout:
            self._spin.waited(monotonic() - begun)
        if self.unread:
            # First, or direct connections could keep it waiting without limit.
            return self._read_router()
        return messages.popleft() if messages else None

    def _mark_unread(self) -> None:
        self.unread = True

    def _read_router(self) -> Received | None:
        """Reads the next message of the ROUTER socket."""
        try:
            routing_id: bytes = self._socket.recv()
        except zmq.Again:
            return None
        identity: bytes | None = None
        first = b""
        try:
            # The routing id is always followed by a frame.
            identity = self._senders.get(routing_id)
            if identity is not None:
                first = self._socket.recv()
            else:
                frame: zmq.Frame = self._socket.recv(copy=False)
                identity, first = self._sender(routing_id, frame), frame.bytes
            buffers: list[Any] = []
            while self._socket.getsockopt(zmq.RCVMORE):
                buffers.append(self._socket.recv(copy=False))
        except (MemoryError, RecursionError):
            # The message is lost. The next one must not begin with the rest of it.
            while self._socket.getsockopt(zmq.RCVMORE):
                self._socket.recv(copy=False)
            # If the chunk of a message is missing, the next one shows that.
            if not identity or first[:1] in (b"", BEGINS_CHUNK):
                raise
            return identity, remnant(first), ()
        self.received_bytes += len(first) + sum(map(len, buffers))
        self.unread = self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN != 0
        return identity, first, buffers

    def _sender(self, routing_id: bytes, frame: zmq.Frame) -> bytes:
        """Returns the identity of the worker that has sent a frame.

        Of what the connection says of itself, only the first letter counts if it has a key: see
        `zrpc.transport.curve`. For heartbeats, whose connection is answered, all of it does.
        """
        shown = routing_id if routing_id[0] else _own_identity(frame) or routing_id
        identity = identity_of(shown)
        try:
            name = str(frame.get("User-Id")).encode()
        except zmq.ZMQError:  # it has no key: it is this worker, a neighbour, or none has a key
            name = identity[1:]
        if shown[0] == HEARTBEAT_LETTER:
            return shown if identity[1:] == name else NOBODY
        sender = shown[:1] + name
        # An id without a random part could later be that of another connection, too.
        if routing_id[0] and identity != routing_id and len(self._senders) < _MAX_SENDERS:
            self._senders[routing_id] = sender
        return sender

    def answer(self, routing_id: bytes, frames: Sequence[bytes]) -> None:
        """Sends a message by the connection that a peer has made, if there is one.

        Never waits: ZeroMQ drops the message if the peer reads nothing.
        """
        # To send is to process what ZeroMQ's thread has reported: a message may have come, and the
        # descriptor no longer shows it.
        self.unread = True
        self._socket.send_multipart([routing_id, *frames], zmq.NOBLOCK)

    def strangers_left_memory(self) -> bool:
        """Whether many connections of strangers were closed; see `_Strangers`."""
        return self._strangers is not None and self._strangers.left_memory(monotonic())

    def close(self) -> None:
        """Closes all sockets; unread messages are dropped."""
        if self._strangers is not None:
            self._strangers.close()
        if self._direct is not None:
            self._direct.close()
        self.poller.close()
        self._socket.close()


class _Strangers:
    """Counts the connections to an inbox whose handshake has failed: they may leave memory behind.

    ZeroMQ holds what a stranger's connection sends, up to one frame, until it is closed. Then the
    memory is free, but malloc keeps it (see `zrpc.runtime.allocator`). So the worker counts these
    connections, and gives free memory back to the system after many. For one thread at a time.

    Args:
        context: of the inbox.
        inbox: a socket that is about to listen.
    """

    def __init__(self, context: zmq.Context[Any], inbox: zmq.Socket[Any]) -> None:
        self._inbox = inbox
        self._monitor: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        address = f"inproc://zrpc-strangers-{id(self)}"
        inbox.monitor(address, _FAILURES)
        # No limit: otherwise libzmq's I/O thread would wait for room.
        self._monitor.rcvhwm = 0
        self._monitor.connect(address)
        self._left = 0
        self._next = 0.0

    def left_memory(self, now: float) -> bool:
        """Whether many have left since this last returned True; must be called often.

        Args:
            now: the time in seconds, on a clock that does not go back.
        """
        while True:
            try:
                self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._left += 1
        if self._left < _MANY_STRANGERS or now < self._next:
            return False
        self._left, self._next = 0, now + _STRANGERS_PAUSE_SECONDS
        return True

    def close(self) -> None:
        """Counts no more."""
        self._inbox.disable_monitor()
        self._monitor.close(linger=0)

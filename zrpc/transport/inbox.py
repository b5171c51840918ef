"""What a worker receives on."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from zrpc.transport.chunks import LARGEST_FRAME
from zrpc.transport.curve import Curve
from zrpc.transport.direct import BACKLOG, Delivered, DirectInbox, direct_path
from zrpc.transport.poller import Poller, supports_polling

__all__ = ["Inbox", "OutOfMemory"]

# The sender's identity, the first frame and the others.
Received = tuple[bytes, bytes, Sequence[Any]]


class OutOfMemory(MemoryError):
    """There is no memory for a message, which is lost.

    Attributes:
        identity: the sender's.
        first: its first frame, or the beginning of that; None where that is lost too.
    """

    def __init__(self, identity: bytes, first: bytes | memoryview | None = None) -> None:
        super().__init__("there is no memory for a message that has come")
        self.identity = identity
        self.first = first


def _own_identity(frame: zmq.Frame) -> bytes | None:
    """The routing id by which the sender of a frame connected; None where it gave none.

    Once a sender has connected anew, ZeroMQ calls the old connection by an id of its own, which
    begins with a zero byte; what came by it may still be unread.
    """
    try:
        return str(frame.get("Identity")).encode()
    except (zmq.ZMQError, UnicodeDecodeError):
        return None


# Lets another thread have this core, if one wants it.
_yield = getattr(os, "sched_yield", partial(time.sleep, 0))


class Inbox:
    """A ROUTER socket that only receives, and the direct connections; for one thread at a time.

    Args:
        context: the agent's.

    Attributes:
        poller: waits for all of these; None where there are no direct connections, and the socket
            is waited for by itself, which is faster then.
    """

    def __init__(self, context: zmq.Context[Any]) -> None:
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.rcvhwm = 0
        # A peer whose connection broke without a word connects anew; its messages are to be
        # read, though the old connection may seem to stand. Its routing id is a secret of the mesh.
        self._socket.router_handover = True
        self._socket.backlog = BACKLOG
        self._timeout_ms = -1
        self.poller: Poller | None = None
        self._direct: DirectInbox | None = None
        # What direct connections have brought.
        self._messages: deque[Delivered] = deque()
        # Whether the ROUTER socket may have a message. Its descriptor tells only of changes, and
        # whoever has looked must read until there is none.
        self._unread = True
        self.inproc = f"inproc://zrpc-inbox-{id(self)}"
        self._socket.bind(self.inproc)

    def bind_ipc(self, path: Path) -> str:
        """Listens on a Unix socket at ``path``, and for direct connections next to it.

        Returns:
            The endpoint.
        """
        endpoint = f"ipc://{path}"
        self._socket.bind(endpoint)
        if supports_polling():
            self.poller = Poller()
            self.poller.watch_readable(self._socket.getsockopt(zmq.FD), self._note_unread)
            deliver = self._messages.append
            self._direct = DirectInbox(direct_path(endpoint), self.poller, deliver)
        return endpoint

    def listen_again(self) -> None:
        """Accepts direct connections again, after there were no descriptors for one."""
        if self._direct is not None:
            self._direct.listen()

    def bind_tcp(self, address: str, curve: Curve | None) -> str:
        """Listens on a free port of one interface; returns the endpoint.

        What is set here holds for what is bound from now on, not for the Unix socket.
        """
        self._socket.maxmsgsize = LARGEST_FRAME
        if curve is not None:
            curve.guard_inbox(self._socket)
        if ":" in address:
            self._socket.ipv6 = True
            address = f"[{address}]"
        self._socket.bind(f"tcp://{address}:*")
        endpoint: str = self._socket.last_endpoint.decode().rstrip("\0")
        return endpoint

    def receive(self, timeout: float, spin: float = 0.0) -> Received | None:
        """Waits for a message. Not to be interrupted by an exception, see `zrpc.interrupts`.

        Args:
            timeout: seconds, rounded up to milliseconds.
            spin: seconds to look again and again before going to sleep; may outlast the timeout.
                A thread that sleeps has to be woken, which takes 10 to 20 us where its core sleeps
                too; ZeroMQ's message wakes several.

        Returns:
            The sender's identity, the first frame and the buffers, or None where the timeout
            passed first.

        Raises:
            OutOfMemory: a message is lost.
        """
        if self.poller is None:
            return self._receive_from_socket(timeout, spin)
        if not self._messages:
            if not self._wait(self.poller, timeout, spin):
                return None
            if self._unread:
                # First, or it might never be its turn where direct connections bring ever more.
                return self._read()
        return self._next()

    def at_hand(self) -> Received | None:
        """A message of a direct connection that has been read already, if there is one.

        Raises:
            OutOfMemory: a message is lost.
        """
        return self._next() if self._messages else None

    def _next(self) -> Received:
        identity, first, buffers = self._messages.popleft()
        if first is None or buffers is None:
            raise OutOfMemory(identity, first)
        return identity, first, buffers

    def _wait(self, poller: Poller, timeout: float, spin: float) -> bool:
        """Waits for a message; whether there is one, from a direct connection or at the socket.

        In the latter case `_unread` is true, else it is not.
        """
        now = time.perf_counter()
        awake, deadline = now + spin, now + timeout
        if self._unread:
            self._unread = self._has_unread()
        while True:
            if now < awake:
                poller.poll(0)
                if not (self._messages or self._unread):
                    _yield()
            else:
                poller.poll(0 if self._unread else max(0.0, deadline - now))
            if self._unread:
                self._unread = self._has_unread()
            if self._unread or self._messages:
                return True
            now = time.perf_counter()
            if now >= deadline and now >= awake:
                return False

    def _note_unread(self) -> None:
        self._unread = True

    def _has_unread(self) -> bool:
        return bool(self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN)

    def _receive_from_socket(self, timeout: float, spin: float) -> Received | None:
        if spin > 0:
            self._spin(spin)
        timeout_ms = int(timeout * 1000) + 1
        if timeout_ms != self._timeout_ms:
            self._timeout_ms = timeout_ms
            self._socket.setsockopt(zmq.RCVTIMEO, timeout_ms)
        return self._read()

    def _read(self) -> Received | None:
        """The next message at the ROUTER socket."""
        try:
            identity: bytes = self._socket.recv()
        except zmq.Again:
            return None
        first: bytes | None = None
        try:
            # After the identity there is always a frame.
            if identity[0]:
                first = self._socket.recv()
            else:
                frame: zmq.Frame = self._socket.recv(copy=False)
                identity, first = _own_identity(frame) or identity, frame.bytes
            buffers: list[Any] = []
            while self._socket.getsockopt(zmq.RCVMORE):
                buffers.append(self._socket.recv(copy=False))
        except MemoryError as error:
            # To the end of the message, or the next one would begin with the rest of it.
            while self._socket.getsockopt(zmq.RCVMORE):
                self._socket.recv(copy=False)
            raise OutOfMemory(identity, first) from error
        return identity, first, buffers

    def _spin(self, seconds: float) -> None:
        """Returns once a message is there, or the time is over."""
        end = time.perf_counter() + seconds
        while not self._has_unread() and time.perf_counter() < end:
            _yield()

    def close(self) -> None:
        """Closes all; unread messages are dropped."""
        if self._direct is not None and self.poller is not None:
            self._direct.close()
            self.poller.close()
        self._socket.close()

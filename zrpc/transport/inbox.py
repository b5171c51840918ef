"""The socket that a worker receives on."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from zrpc.transport.chunks import LARGEST_FRAME
from zrpc.transport.curve import Curve

__all__ = ["Inbox", "OutOfMemory"]


class OutOfMemory(MemoryError):
    """There is no memory for a message, which is lost.

    Attributes:
        identity: the sender's.
        first: its first frame; None where that is lost too.
    """

    def __init__(self, identity: bytes, first: bytes | None = None) -> None:
        super().__init__("there is no memory for a message that has come")
        self.identity = identity
        self.first = first


# Lets another thread have this core, if one wants it.
_yield = getattr(os, "sched_yield", partial(time.sleep, 0))


class Inbox:
    """A ROUTER socket that only receives, for one thread at a time.

    Args:
        context: the agent's.
    """

    def __init__(self, context: zmq.Context[Any]) -> None:
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.rcvhwm = 0
        # A peer whose connection broke without a word connects anew; its messages are to be
        # read, though the old connection may seem to stand. Its routing id is a secret of the mesh.
        self._socket.router_handover = True
        # A whole mesh may connect at once.
        self._socket.backlog = 4096
        self._timeout_ms = -1
        self.inproc = f"inproc://zrpc-inbox-{id(self)}"
        self._socket.bind(self.inproc)

    def bind_ipc(self, path: Path) -> str:
        """Listens on a Unix socket at ``path``; returns the endpoint."""
        endpoint = f"ipc://{path}"
        self._socket.bind(endpoint)
        return endpoint

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

    def receive(self, timeout: float, spin: float = 0.0) -> tuple[bytes, bytes, list[Any]] | None:
        """Waits for a message. Not to be interrupted by an exception, see `zrpc.interrupts`.

        Args:
            timeout: seconds, rounded up to milliseconds.
            spin: seconds to look again and again before going to sleep; may outlast the timeout.
                A message wakes several threads on its way, each of which takes 10 to 20 us where
                its core sleeps too.

        Returns:
            The sender's identity, the first frame and the buffers, or None where the timeout
            passed first.

        Raises:
            OutOfMemory: a message is lost.
        """
        if spin > 0:
            self._spin(spin)
        timeout_ms = int(timeout * 1000) + 1
        if timeout_ms != self._timeout_ms:
            self._timeout_ms = timeout_ms
            self._socket.setsockopt(zmq.RCVTIMEO, timeout_ms)
        try:
            identity: bytes = self._socket.recv()
        except zmq.Again:
            return None
        first: bytes | None = None
        try:
            first = self._socket.recv()  # after the identity there is always a frame
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
        events, clock = self._socket.getsockopt, time.perf_counter
        end = clock() + seconds
        while not events(zmq.EVENTS) & zmq.POLLIN and clock() < end:
            _yield()

    def close(self) -> None:
        """Closes the socket; unread messages are dropped."""
        self._socket.close()

"""The socket that a worker receives on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import zmq

__all__ = ["Inbox"]


class Inbox:
    """A ROUTER socket that only receives, for one thread at a time.

    Args:
        context: the agent's.
    """

    def __init__(self, context: zmq.Context[Any]) -> None:
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.rcvhwm = 0
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

    def bind_tcp(self, address: str) -> str:
        """Listens on a free port of one interface; returns the endpoint."""
        if ":" in address:
            self._socket.ipv6 = True
            address = f"[{address}]"
        port = self._socket.bind_to_random_port(f"tcp://{address}")
        return f"tcp://{address}:{port}"

    def receive(self, timeout: float) -> tuple[bytes, bytes, list[zmq.Frame]] | None:
        """Waits for a message. Not to be interrupted by an exception, see `zrpc.interrupts`.

        Args:
            timeout: seconds, rounded up to milliseconds.

        Returns:
            The sender's identity, the first frame and the buffers, or None where the timeout
            passed first.
        """
        timeout_ms = int(timeout * 1000) + 1
        if timeout_ms != self._timeout_ms:
            self._timeout_ms = timeout_ms
            self._socket.setsockopt(zmq.RCVTIMEO, timeout_ms)
        try:
            identity: bytes = self._socket.recv()
        except zmq.Again:
            return None
        first: bytes = self._socket.recv()  # after the identity there is always a frame
        buffers: list[zmq.Frame] = []
        while self._socket.getsockopt(zmq.RCVMORE):
            buffers.append(self._socket.recv(copy=False))
        return identity, first, buffers

    def close(self) -> None:
        """Closes the socket; unread messages are dropped."""
        self._socket.close()

"""Two processes that exchange messages over ZeroMQ with nothing in between."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import zmq

__all__ = ["RawEcho", "RawPeer"]

# From here on pyzmq is faster without a copy.
_NO_COPY = 256 * 1024
_PATIENCE_MS = 30_000


class RawEcho:
    """Worker 1 of a mesh for limits: answers every message, in a thread of its own.

    A message of one frame comes back as it is, of one with two comes the first back.

    Args:
        address: where to listen, ``ipc://…`` or ``tcp://127.0.0.1:*``.
    """

    def __init__(self, address: str) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        socket = _without_limits(self._context.socket(zmq.ROUTER))
        socket.bind(address)
        self.endpoint: str = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        threading.Thread(target=_answer, args=(socket,), daemon=True).start()


def _answer(socket: zmq.Socket[Any]) -> None:
    """The life of the thread; it ends with the process."""
    with contextlib.suppress(zmq.ContextTerminated), socket:
        while True:
            # As a view where large: ZeroMQ gives it back to the sender without a copy.
            sender, first, *_ = socket.recv_multipart(copy=False)
            copied = len(first) < _NO_COPY
            answer: Any = first.bytes if copied else first
            socket.send_multipart([sender.bytes, answer], copy=copied)


class RawPeer:
    """Worker 0 of a mesh for limits.

    Args:
        endpoint: the echo's.
    """

    def __init__(self, endpoint: str) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = _without_limits(self._context.socket(zmq.DEALER))
        self._socket.setsockopt(zmq.RCVTIMEO, _PATIENCE_MS)
        self._socket.connect(endpoint)

    def echo(self, data: bytes) -> None:
        """Sends a frame and waits for it to come back."""
        copied = len(data) < _NO_COPY
        self._socket.send(data, 0, copied)
        self._socket.recv(copy=copied)

    def one_way(self, data: bytes) -> None:
        """Sends a frame and waits for an empty one."""
        self._socket.send_multipart([b"", data], copy=len(data) < _NO_COPY)
        self._socket.recv()

    def pipelined(self, data: bytes, count: int) -> None:
        """Sends many frames, then waits for all of them to come back."""
        for _ in range(count):
            self._socket.send(data)
        for _ in range(count):
            self._socket.recv()


def _without_limits(socket: zmq.Socket[Any]) -> zmq.Socket[Any]:
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    return socket

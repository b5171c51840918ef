"""Two processes that exchange messages over bare ZeroMQ."""

from __future__ import annotations

import threading
from typing import Any

import zmq

# From this size on, pyzmq is faster without a copy.
_ZERO_COPY_BYTES = 256 * 1024
_RECEIVE_TIMEOUT_MS = 30_000


def start_echo(address: str) -> str:
    """Starts worker 1 of a mesh that measures limits: a thread that answers every message.

    It sends back the first frame of each message, until the process exits.

    Args:
        address: the address to listen on, ``ipc://…`` or ``tcp://127.0.0.1:*``.

    Returns:
        The endpoint to connect to.
    """
    socket = _new_socket(zmq.ROUTER)
    socket.bind(address)
    endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    threading.Thread(target=_answer, args=(socket,), daemon=True).start()
    return endpoint


def _answer(socket: zmq.Socket[Any]) -> None:
    while True:
        # A large frame is sent back as a view, without a copy.
        sender, first, *_ = socket.recv_multipart(copy=False)
        copied = len(first) < _ZERO_COPY_BYTES
        answer: Any = first.bytes if copied else first
        socket.send_multipart([sender.bytes, answer], copy=copied)


class RawPeer:
    """Worker 0 of a mesh that measures limits.

    Args:
        endpoint: what `start_echo` has returned on worker 1.
    """

    def __init__(self, endpoint: str) -> None:
        self._socket = _new_socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RCVTIMEO, _RECEIVE_TIMEOUT_MS)
        self._socket.connect(endpoint)

    def echo(self, data: bytes) -> None:
        """Sends a frame and receives it back."""
        copied = len(data) < _ZERO_COPY_BYTES
        self._socket.send(data, 0, copied)
        self._socket.recv(copy=copied)

    def one_way(self, data: bytes) -> None:
        """Sends a frame and receives an empty one."""
        self._socket.send_multipart([b"", data], copy=len(data) < _ZERO_COPY_BYTES)
        self._socket.recv()

    def pipelined(self, data: bytes, count: int) -> None:
        """Sends ``count`` frames, then receives them all back."""
        for _ in range(count):
            self._socket.send(data)
        for _ in range(count):
            self._socket.recv()


def _new_socket(kind: int) -> zmq.Socket[Any]:
    socket: zmq.Socket[Any] = zmq.Context.instance().socket(kind)
    socket.set_hwm(0)  # no limit
    socket.setsockopt(zmq.LINGER, 0)
    return socket

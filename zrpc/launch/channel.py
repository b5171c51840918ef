"""What a starter and its server send each other: messages with open descriptors, and exits."""

from __future__ import annotations

import os
import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any

_LENGTH = struct.Struct("=Q")
MAX_DESCRIPTORS = 250  # the kernel's limit for one message is 253
EXIT_RECORD = struct.Struct("=qq")  # process id, exit code
EXITS_BYTES = 256 * EXIT_RECORD.size  # the most that are sent at once


class Channel:
    """One end of a connection between two processes that trust each other.

    Not thread-safe. Descriptors that arrive are not inheritable and belong to the receiver.

    Args:
        sock: A connected `AF_UNIX` stream socket, which the channel owns. Its timeout, if it
            has one, bounds each single send or receive.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def fileno(self) -> int:
        """Returns the socket's descriptor, for a selector."""
        return self._sock.fileno()

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Sends one message, and copies of the descriptors `fds` with it."""
        body = pickle.dumps(message)
        head = _LENGTH.pack(len(body))
        # Descriptors travel with the first byte, so a short write of the head loses none.
        sent = socket.send_fds(self._sock, [head], list(fds)) if fds else 0
        self._sock.sendall(head[sent:] + body)

    def receive(self) -> tuple[Any, list[int]]:
        """Waits for one message; returns it and the descriptors that arrived with it.

        Raises:
            EOFError: The other end is closed.
            TimeoutError: The socket's timeout passed.
        """
        fds: list[int] = []
        try:
            head = self._read_exactly(_LENGTH.size, fds)
            (size,) = _LENGTH.unpack(head)
            return pickle.loads(self._read_exactly(size, fds)), fds
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise

    def _read_exactly(self, size: int, fds: list[int]) -> bytes:
        data = bytearray()
        while len(data) < size:
            wanted = min(size - len(data), 1 << 20)
            try:
                part, new, _, _ = socket.recv_fds(
                    self._sock, wanted, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
                )
            except ConnectionError:
                part, new = b"", []
            fds += new
            if not part:
                raise EOFError("the other end of the channel is closed")
            data += part
        return bytes(data)

    def close(self) -> None:
        """Closes this end."""
        self._sock.close()

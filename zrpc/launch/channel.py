"""What a starter and its server send each other: messages with open descriptors, and exits."""

from __future__ import annotations

import os
import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any

MAX_DESCRIPTORS = 250  # the kernel's limit for one message is 253
EXIT_RECORD = struct.Struct("=qq")  # process id, exit code
EXITS_BYTES = 256 * EXIT_RECORD.size  # the most that are sent at once


class Channel:
    """One end of a connection between two processes that trust each other.

    A message is a byte, with which the descriptors travel, and a pickle. Not thread-safe.
    Descriptors that arrive are not inheritable and belong to the receiver.

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
        data = b"\0" + pickle.dumps(message)
        sent = socket.send_fds(self._sock, [data], list(fds))
        self._sock.sendall(data[sent:])

    def receive(self) -> tuple[Any, list[int]]:
        """Waits for one message; returns it and the descriptors that arrived with it.

        Raises:
            EOFError: The other end is closed.
            TimeoutError: The socket's timeout passed.
        """
        fds: list[int] = []
        try:
            first, fds, _, _ = socket.recv_fds(
                self._sock, 1, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
            if not first:
                raise EOFError("the other end of the channel is closed")
            # A larger buffer would also take what is sent after the message.
            with self._sock.makefile("rb", buffering=1) as file:
                return pickle.load(file), fds
        except BaseException as error:
            for fd in fds:
                os.close(fd)
            if isinstance(error, (ConnectionError, pickle.UnpicklingError)):
                raise EOFError("the other end was closed within a message") from error
            raise

    def close(self) -> None:
        """Closes this end."""
        self._sock.close()

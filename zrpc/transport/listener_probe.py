"""Checks whether anything listens at a TCP address, without waiting."""

from __future__ import annotations

import errno
import select
import socket
from urllib.parse import urlsplit


class ListenerProbe:
    """One attempt to connect to an endpoint, in progress from now on.

    When a worker's process has ended, even by ``kill -9``, its host refuses connections to it at
    once. An attempt that gets no answer says nothing.

    Args:
        endpoint: ``tcp://address:port`` with a numeric address.
    """

    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        assert parts.hostname is not None
        family = socket.AF_INET6 if ":" in parts.hostname else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._error = self._socket.connect_ex((parts.hostname, parts.port))
        # Not ``select``, which takes no descriptor from 1024 on.
        self._answer = select.poll()
        self._answer.register(self._socket, select.POLLOUT)

    def listening(self) -> bool | None:
        """Returns False if the connection was refused; None if there is no answer (yet)."""
        if self._error == errno.EINPROGRESS and self._answer.poll(0):
            self._error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        return {0: True, errno.ECONNREFUSED: False}.get(self._error)

    @property
    def pending(self) -> bool:
        """Whether an answer may still come."""
        return self._error == errno.EINPROGRESS

    def close(self) -> None:
        """Closes the attempt's socket."""
        self._socket.close()

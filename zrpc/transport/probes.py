"""Checks what reaches a TCP address, without waiting: anything at all, and large packets.

A path may drop packets above a size without a word, as a tunnel does behind a firewall that drops
the messages about that (an *MTU black hole*). Then connections are made, and heartbeats answered,
but nothing large arrives.
"""

from __future__ import annotations

import errno
import fcntl
import select
import socket
import struct
import termios
from urllib.parse import urlsplit

from typing_extensions import override

# The beginning of a connection by a mechanism that no worker has: it is closed when this arrives.
# It is sent at once, so that the first packet is as large as packets get.
_CONTENT = (b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"PROBE").ljust(1 << 14, b"\0")
# So often a packet is sent in vain until it is no chance: for about three seconds.
_RETRANSMITS = 4


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


class PathProbe(ListenerProbe):
    """Sends large packets to an endpoint at which a worker listens, from now on."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        self._sent = False

    def large_packets_arrive(self) -> bool | None:
        """Whether they arrive; None if that is not known (yet). Never waits."""
        if not self._sent:
            if not self.listening():
                return None
            self._socket.send(_CONTENT)
            self._sent = True
        unacknowledged = fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(4))
        if unacknowledged == bytes(4) or self._socket.getsockopt(
            socket.SOL_SOCKET, socket.SO_ERROR
        ):
            return True  # also if the connection was reset: that answers the first large packet
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)
        return False if struct.unpack("8B", info)[2] >= _RETRANSMITS else None

    @property
    @override
    def pending(self) -> bool:
        """Whether more may be known later."""
        return super().pending or self._sent

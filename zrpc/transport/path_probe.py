"""Checks whether large packets reach a host to which small ones get through.

A path may drop packets above a size without a word, as a tunnel does behind a firewall that drops
the messages about that (an *MTU black hole*). Then connections are made, and heartbeats answered,
but nothing large arrives.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import termios

from typing_extensions import override

from zrpc.transport.listener_probe import ListenerProbe

# The beginning of a connection by a mechanism that no worker has: it is closed when this arrives.
# It is sent at once, so that the first packet is as large as packets get.
_CONTENT = (b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"PROBE").ljust(1 << 14, b"\0")
# So often a packet is sent in vain until it is no chance: for about three seconds.
_RETRANSMITS = 4


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

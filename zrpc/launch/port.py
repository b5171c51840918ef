"""Reserves a free port for the workers' rendezvous."""

from __future__ import annotations

import socket
from typing import Self


class ReservedPort:
    """A TCP port that the system assigns to no other socket while this object is open.

    The port is bound, but nothing listens on it. Both sides set ``SO_REUSEADDR``, as TCPStore
    does, so Linux still lets worker 0 bind it and listen on it. But Linux never assigns it to a
    socket that asks for any free port, so no other process can take it by chance between the
    choice and the use of it.

    Attributes:
        number: The port.

    Example:
        >>> with ReservedPort() as port:
        ...     1 <= port.number <= 65535
        True
    """

    def __init__(self) -> None:
        # On both families if the machine has them: TCPStore listens on "::".
        both = socket.has_dualstack_ipv6()
        self._sock = socket.socket(socket.AF_INET6 if both else socket.AF_INET)
        if both:
            self._sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._sock.bind(("", 0))
        self.number: int = self._sock.getsockname()[1]

    def close(self) -> None:
        """Releases the port."""
        self._sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

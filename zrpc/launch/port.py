"""A free port for the workers' rendezvous."""

from __future__ import annotations

import socket
import sys


class ReservedPort:
    """A TCP port that the system gives to nobody else while this object is open.

    The port is bound but not listened to. As both sides set ``SO_REUSEADDR``, as TCPStore does,
    Linux lets worker 0 bind and listen to it all the same, while it is never handed out to a
    socket that asks for any free port. So there is no moment between choosing the port and
    using it in which another process could take it by chance. Other systems don't allow the
    second bind; there the port has to be let go just before the workers start.

    Attributes:
        number: The port.

    Example:
        >>> with ReservedPort() as port:
        ...     1 <= port.number <= 65535
        True
    """

    def __init__(self) -> None:
        self._sock = _bind_anywhere()
        self.number: int = self._sock.getsockname()[1]

    def workers_start(self) -> None:
        """Let go of the port if the system doesn't let workers share it."""
        if sys.platform != "linux":
            self.close()

    def close(self) -> None:
        """Give the port back."""
        self._sock.close()

    def __enter__(self) -> ReservedPort:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _bind_anywhere() -> socket.socket:
    # On both families where the machine has them: TCPStore listens on "::".
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue
        try:
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            if sys.platform != "win32":  # where the option means something else
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((address, 0))
        except OSError:
            sock.close()
            continue
        return sock
    raise OSError("no TCP port could be bound, neither on IPv6 nor on IPv4")

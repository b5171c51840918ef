from __future__ import annotations

import socket

import pytest

from zrpc.launch.port import ReservedPort


def listen(address: str, port: int, *, reuse: bool) -> None:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        sock.bind((address, port))
        sock.listen()


def test_only_worker_0_can_listen_on_the_reserved_port_until_it_is_closed() -> None:
    with ReservedPort() as port:
        for address in ("127.0.0.1", "0.0.0.0"):
            listen(address, port.number, reuse=True)
        with pytest.raises(OSError, match="in use"):
            listen("127.0.0.1", port.number, reuse=False)
        with ReservedPort() as other:
            assert other.number != port.number
    listen("127.0.0.1", port.number, reuse=False)

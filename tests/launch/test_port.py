from __future__ import annotations

import socket

import pytest

from zrpc.launch.port import ReservedPort


def listen(address: str, port: int, *, reuse: bool) -> None:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        sock.bind((address, port))
        sock.listen()


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_worker_0_can_listen_on_the_reserved_port(address: str) -> None:
    with ReservedPort() as port:
        listen(address, port.number, reuse=True)


def test_others_do_not_get_the_reserved_port() -> None:
    with ReservedPort() as port:
        with pytest.raises(OSError, match="in use"):
            listen("127.0.0.1", port.number, reuse=False)
        with ReservedPort() as other:
            assert other.number != port.number


def test_port_is_free_after_closing() -> None:
    with ReservedPort() as port:
        pass
    listen("127.0.0.1", port.number, reuse=False)

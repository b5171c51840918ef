"""Networks with direct connections, what arrives at them, and numbered messages that fill them."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any

from tests.support.waiting import SOON, until
from zrpc.transport.network import Network
from zrpc.transport.unix_stream import direct_path

FILLING = b"filling " * 1000


def received(network: Network) -> tuple[bytes, bytes, list[bytes]]:
    """Returns the next message, as bytes."""
    # See `Inbox.receive` about a message that is announced only.
    identity, first, buffers = until(lambda: network.receive(SOON), "a message arrives")
    return identity, first, [bytes(buffer) for buffer in buffers]


def endpoint_of(network: Network) -> str:
    return f"ipc://{network.directory.socket_path}"


@contextlib.contextmanager
def opened(count: int = 2, ipc: bool = True) -> Iterator[list[Network]]:
    """Yields networks that don't know each other, and closes them."""
    networks = [Network(b"z%d" % rank, rank, count, ipc) for rank in range(count)]
    try:
        yield networks
    finally:
        for network in networks:
            network.close(0, ())


def connect(networks: Sequence[Network], interface: str = "") -> None:
    """Connects all with each other, by ipc if no interface is named."""
    if interface:
        endpoints = [network.listen_tcp(interface, None) for network in networks]
    else:
        endpoints = [endpoint_of(network) for network in networks]
    for network in networks:
        network.connect(endpoints)


def numbers_of(network: Network, count: int) -> list[int]:
    return [int(received(network)[1].split()[0]) for _ in range(count)]


def all_there(network: Network) -> list[int]:
    """Returns the numbers of the messages that have arrived; waits for one at least."""
    numbers = numbers_of(network, 1)
    while (message := network.receive(0)) is not None:
        numbers.append(int(message[1].split()[0]))
    return numbers


def fill(network: Network, rank: int) -> int:
    """Sends more numbered messages than the system has room for; returns their number."""
    for number in range(400):
        network.send(rank, *numbered(number))
    return 400


def numbered(number: int) -> tuple[Any, ...]:
    """Returns a message that begins with its number, with one frame or two."""
    return (b"%d" % number, [FILLING]) if number % 2 else (b"%d " % number + FILLING,)


def break_connections(network: Network) -> None:
    """Breaks all direct connections to a network, as their system does if it is short of memory."""
    path = str(direct_path(endpoint_of(network)))
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # it is no socket, has no peer, or is closed by now
            if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(fd)) as end:
                if end.family == socket.AF_UNIX and end.getsockname() == path:
                    end.shutdown(socket.SHUT_RDWR)


def ways(network: Network, peer: int) -> set[str]:
    """Returns the ways that messages to a peer have taken: ``direct``, ``ipc``, ``tcp``."""
    return {way for (to, way), size in network.sent_bytes().items() if to == peer and size}

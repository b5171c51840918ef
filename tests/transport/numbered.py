"""Networks with direct connections, and numbered messages that fill them."""

from __future__ import annotations

from typing import Any

from tests.transport.arrivals import received
from zrpc.transport.network import Network

FILLING = b"filling " * 1000


def endpoint_of(network: Network) -> str:
    return f"ipc://{network.directory.socket_path}"


def numbers_of(network: Network, count: int) -> list[int]:
    return [int(received(network)[1].split()[0]) for _ in range(count)]


def all_there(network: Network) -> list[int]:
    """Returns the numbers of the messages that have arrived; waits for one at least."""
    numbers = numbers_of(network, 1)
    while (message := network.receive(0)) is not None:
        numbers.append(int(message[1].split()[0]))
    return numbers


def fill(network: Network, rank: int) -> int:
    """Sends numbered messages until some are queued; returns their number."""
    count = 0
    while not (count and network._mailboxes[rank]._queue):
        network.send(rank, *numbered(count))
        count += 1
    for number in range(count, count + 20):
        network.send(rank, *numbered(number))
    return count + 20


def numbered(number: int) -> tuple[Any, ...]:
    """Returns a message that begins with its number, with one frame or two."""
    return (b"%d" % number, [FILLING]) if number % 2 else (b"%d " % number + FILLING,)


def break_connections(network: Network) -> None:
    """Closes all incoming connections of a network, with their unread bytes."""
    inbox = network._inbox
    for connection in inbox._direct._connections:
        inbox.poller.forget(connection.socket.fileno())
        connection.socket.close()
    inbox._direct._connections.clear()

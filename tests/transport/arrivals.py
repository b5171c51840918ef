"""What arrives at a network."""

from __future__ import annotations

from tests.support.waiting import SOON, until
from zrpc.transport.network import Network


def received(network: Network) -> tuple[bytes, bytes, list[bytes]]:
    """Returns the next message, as bytes."""
    # See `Inbox.receive` about a message that is announced only.
    identity, first, buffers = until(lambda: network.receive(SOON), "a message arrives")
    return identity, first, [bytes(buffer) for buffer in buffers]

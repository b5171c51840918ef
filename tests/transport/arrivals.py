"""What arrives at a network."""

from __future__ import annotations

from tests.support.waiting import SOON
from zrpc.transport.network import Network


def received(network: Network) -> tuple[bytes, bytes, list[bytes]]:
    """Returns the next message, as bytes."""
    message = network.receive(SOON)
    assert message is not None, "nothing arrived"
    identity, first, buffers = message
    return identity, first, [bytes(buffer) for buffer in buffers]

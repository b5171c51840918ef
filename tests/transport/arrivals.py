"""What arrives at a network, and whose messages a worker reads."""

from __future__ import annotations

import zrpc.dispatcher

SOON = 5.0


def received(network):
    """The next message, as bytes."""
    message = network.receive(SOON)
    assert message is not None, "nothing arrived"
    identity, first, buffers = message
    return identity, first, [bytes(buffer) for buffer in buffers]


def spy_on_senders(monkeypatch):
    """The senders of the messages that agents read from now on, one for each; a list that grows."""
    senders = []
    parse = zrpc.dispatcher.parse

    def spy(first, buffers, sender):
        senders.append(sender)
        return parse(first, buffers, sender)

    monkeypatch.setattr(zrpc.dispatcher, "parse", spy)
    return senders

"""Records what arrives at a network, and whose messages a worker reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import zrpc.agent.dispatcher
from tests.support.waiting import SOON
from zrpc.transport.network import Network
from zrpc.wire.member_id import MemberId


def received(network: Network) -> tuple[bytes, bytes, list[bytes]]:
    """Returns the next message, as bytes."""
    message = network.receive(SOON)
    assert message is not None, "nothing arrived"
    identity, first, buffers = message
    return identity, first, [bytes(buffer) for buffer in buffers]


def spy_on_senders(monkeypatch: pytest.MonkeyPatch) -> list[MemberId]:
    """Returns a list that grows: the sender of each message that agents read from now on."""
    senders = []
    parse = zrpc.agent.dispatcher.parse

    def spy(first: bytes, buffers: Sequence[Any], sender: MemberId) -> Any:
        senders.append(sender)
        return parse(first, buffers, sender)

    monkeypatch.setattr(zrpc.agent.dispatcher, "parse", spy)
    return senders

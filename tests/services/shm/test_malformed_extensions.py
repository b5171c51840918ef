"""Peers that say nonsense about shared memory."""

from __future__ import annotations

import logging
import struct
from typing import Any

import pytest
import torch

import zrpc
from tests.services.shm.sharing import (
    LARGE,
    drop,
    keep,
    kept,
    large,
    sends_by_segments,
    service_of,
    until_returned,
)
from tests.support.targets import echo
from tests.support.waiting import until
from zrpc.agent.agent import Agent
from zrpc.testing import Mesh
from zrpc.wire.kind import Kind, Tag
from zrpc.wire.message import Message

pytestmark = sends_by_segments


NUMBER = struct.Struct("<Q")
PLACE = struct.Struct("<IQQ")
NOTE = struct.Struct("<BQ")


def extension(segment: Any, *places: Any, number: Any = None) -> Any:
    rows = [PLACE.pack(*place) for place in places]
    return NUMBER.pack(segment.number if number is None else number) + b"".join(rows)


TOO_MUCH = 2**64 - 1
HOSTILE = {
    "empty": lambda s: b"",
    "truncated number": lambda s: extension(s)[:-1],
    "no places": extension,
    "half a place": lambda s: extension(s, (0, 0, 64)) + b"x" * 7,
    "place behind the end": lambda s: extension(s, (0, s.size, 1)),
    "place over the end": lambda s: extension(s, (0, 0, 64), (1, s.size - 10, 11)),
    "enormous offset": lambda s: extension(s, (0, TOO_MUCH, 1)),
    "enormous size": lambda s: extension(s, (0, 1, TOO_MUCH)),
    "sum that overflows": lambda s: extension(s, (0, 2**63, 2**63)),
    "segment that has not come": lambda s: extension(s, (0, 0, 64), number=10**6),
    "index that isn't": lambda s: extension(s, (5, 0, 64)),
    "size 0 of nothing": lambda s: extension(s, (0, 0, 0), number=10**6),
}


def call_with(agent: Agent, to: int, tag: Tag, data: bytes) -> Any:
    """Calls ``echo`` with an extension; returns the result."""
    body, member = (echo, (1,), {}), agent.membership.find(to)
    return agent.caller.call(member, Kind.CALL, body, 20, extension=(tag, data))


def test_an_extension_of_nonsense_is_an_error_at_the_caller(
    joined: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    agent, ours = joined.agent(0), service_of(joined, 0)
    errors = (zrpc.ProtocolError, OSError, ValueError, struct.error)
    for hostile in HOSTILE.values():
        assert zrpc.rpc_sync(1, torch.numel, (large(1),)) == LARGE
        segment = next(iter(ours.pool._segments.values()))
        with caplog.at_level(logging.CRITICAL, logger="zrpc"), pytest.raises(errors, match=r"."):
            call_with(agent, 1, Tag.SHARED, hostile(segment))
        assert torch.equal(zrpc.rpc_sync(1, torch.neg, (large(1),)), -large(1))
        until_returned(ours)
        until(lambda: not service_of(joined, 1).loans._open, collect=True)


NOTES = {
    "empty": b"",
    "half": b"\x01\x02",
    "unknown verb": NOTE.pack(99, 0),
    "return of what another has": NOTE.pack(1, 0),
    "keep of what another has": NOTE.pack(2, 0),
    "return of what isn't": NOTE.pack(1, TOO_MUCH),
    "keep of what isn't": NOTE.pack(2, TOO_MUCH),
    "closed what isn't": NOTE.pack(3, TOO_MUCH),
}


@pytest.mark.zrpc(workers=3)
def test_words_of_nonsense_change_nothing(joined: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    ours = service_of(joined, 0)
    zrpc.rpc_sync(1, keep, ("held", large(1)))
    number = next(n for n, s in ours.pool._segments.items() if s.borrower == 1)
    assert ours.pool.lent == 1
    before = set(ours.pool._segments)
    with caplog.at_level(logging.CRITICAL, logger="zrpc"):
        for note in NOTES.values():
            head = note[: NOTE.size]
            if len(head) == NOTE.size and head[0] in (1, 2) and head[1:] == bytes(8):
                note = NOTE.pack(head[0], number)
            joined.agent(2).outbox.post(0, Message(Kind.SEGMENT, body=note))
            # Behind it in the queue: answered when it has been read.
            assert joined.run(2, zrpc.rpc_sync, 0, echo, (3,)) == 3
            assert ours.pool.lent == 1, note
    assert before <= set(ours.pool._segments)
    for i in range(3):
        assert torch.equal(zrpc.rpc_sync(1, torch.neg, (large(i),)), -large(i))
    assert torch.equal(kept()["held"], large(1))
    drop("held")
    until_returned(ours)


@pytest.mark.zrpc(workers=3)
def test_returns_of_nonsense_change_nothing(joined: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    ours, stranger = service_of(joined, 0), joined.agent(2)
    zrpc.rpc_sync(1, keep, ("held", large(1)))
    another_s = next(n for n, s in ours.pool._segments.items() if s.borrower == 1)
    for data in (b"", struct.pack("<Q", another_s), struct.pack("<Q", TOO_MUCH)):
        assert call_with(stranger, 0, Tag.RETURNED, data) == 1
    with (
        caplog.at_level(logging.CRITICAL, logger="zrpc"),
        pytest.raises(zrpc.ProtocolError, match="extension"),
    ):
        call_with(stranger, 0, Tag.RETURNED, b"half")
    assert ours.pool.lent == 1
    drop("held")
    until_returned(ours)

"""Peers that say nonsense about shared memory."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import shutil
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
    make,
    sends_by_segments,
    service_of,
    until_returned,
)
from tests.support.targets import echo
from tests.support.waiting import until
from zrpc.agent.agent import Agent
from zrpc.services.shm.borrowed import MAX_KNOWN
from zrpc.services.shm.segments import record
from zrpc.testing import Mesh
from zrpc.testing.procfs import descriptors
from zrpc.transport.descriptors import DescriptorSocket
from zrpc.wire.kind import Kind, Tag
from zrpc.wire.message import Message

pytestmark = sends_by_segments


RECORD = struct.Struct("<QQ")
NOTE = struct.Struct("<BQ")


def extension(segment: Any, *places: Any, number: Any = None) -> Any:
    offsets, sizes = zip(*places, strict=True) if places else ((), ())
    return record(segment.number if number is None else number, offsets, sizes)


TOO_MUCH = 2**64 - 1
HOSTILE = {
    "empty": lambda s: b"",
    "truncated number": lambda s: extension(s)[:-1],
    "no places": extension,
    "fewer places than it says": lambda s: RECORD.pack(s.number, 2),
    "enormous number of places": lambda s: RECORD.pack(s.number, TOO_MUCH),
    "half a place": lambda s: extension(s, (0, 64)) + b"x" * 7,
    "two segments": lambda s: extension(s, (0, 64)) * 2,
    "place behind the end": lambda s: extension(s, (s.size, 1)),
    "place over the end": lambda s: extension(s, (0, 64), (s.size - 10, 11)),
    "enormous offset": lambda s: extension(s, (TOO_MUCH, 1)),
    "enormous size": lambda s: extension(s, (1, TOO_MUCH)),
    "sum that overflows": lambda s: extension(s, (2**63, 2**63)),
    "segment that has not come": lambda s: extension(s, (0, 64), number=10**6),
    "size 0 of nothing": lambda s: extension(s, (0, 0), number=10**6),
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
        segment = next(iter(ours.pool.segments.values()))
        with caplog.at_level(logging.CRITICAL, logger="zrpc"), pytest.raises(errors, match=r"."):
            call_with(agent, 1, Tag.SHARED, hostile(segment))
        assert torch.equal(zrpc.rpc_sync(1, torch.neg, (large(1),)), -large(1))
        until_returned(ours)
        until(lambda: not service_of(joined, 1).loans.open, collect=True)


NOTES = {
    "empty": lambda held: b"",
    "half": lambda held: b"\x01\x02",
    "unknown verb": lambda held: NOTE.pack(99, 0),
    "return of what another has": lambda held: NOTE.pack(1, held),
    "keep of what another has": lambda held: NOTE.pack(2, held),
    "return of what isn't": lambda held: NOTE.pack(1, TOO_MUCH),
    "keep of what isn't": lambda held: NOTE.pack(2, TOO_MUCH),
    "closed what isn't": lambda held: NOTE.pack(3, TOO_MUCH),
}


@pytest.mark.zrpc(workers=3)
def test_notes_of_nonsense_change_nothing(joined: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    ours, stranger = service_of(joined, 0), joined.agent(2)
    zrpc.rpc_sync(1, keep, ("held", large(1)))
    (held,) = (n for n, s in ours.pool.segments.items() if 1 in s.borrowers)
    with caplog.at_level(logging.CRITICAL, logger="zrpc"):
        for what, hostile in NOTES.items():
            data = hostile(held)
            stranger.outbox.post(0, Message(Kind.SEGMENT, extensions=[(Tag.SEGMENTS, data)]))
            if what in ("half", "unknown verb"):
                with pytest.raises(zrpc.ProtocolError, match=r"extension|known verb"):
                    call_with(stranger, 0, Tag.SEGMENTS, data)
            else:
                assert call_with(stranger, 0, Tag.SEGMENTS, data) == 1
            assert (ours.pool.lent, held in ours.pool.segments) == (1, True), what
    assert torch.equal(zrpc.rpc_sync(1, torch.neg, (large(2),)), -large(2))
    assert torch.equal(kept()["held"], large(1))
    drop("held")
    until_returned(ours)


@pytest.mark.zrpc(workers=3)
def test_a_peer_that_sends_too_many_descriptors_harms_only_itself(joined: Mesh) -> None:
    hostile = joined.agent(2)
    fd = os.memfd_create("hostile", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    place = hostile.network.endpoint(0)

    def kept_open() -> int:
        return sum("memfd:hostile" in link for link in descriptors().values()) - 1

    numbers = itertools.count()

    def flood() -> int:
        with contextlib.suppress(BlockingIOError):
            while True:
                hostile.network.descriptors.send(2, place, next(numbers), fd)
        return kept_open()

    until(lambda: flood() == MAX_KNOWN)
    other = service_of(joined, 1)
    for i in range(3):  # while there is no room for descriptors
        flood()
        assert torch.equal(zrpc.rpc_sync(1, torch.neg, (large(i),)), -large(i))
    until(lambda: zrpc.rpc_sync(1, make, (1,)).numel() == LARGE and other.sent_bytes)
    until(lambda: kept_open() == MAX_KNOWN)  # one more while another one comes in its place
    hostile.shutdown(graceful=False)
    until(lambda: kept_open() == 0)
    os.close(fd)
    # One that is lost, and sends more.
    directory = hostile.network.directory.path
    directory.mkdir()
    again = DescriptorSocket(directory)
    ours, theirs = os.pipe()
    again.send(2, place, 0, theirs)
    os.close(theirs)
    assert os.read(ours, 1) == b""  # nobody has the other end
    again.close()
    os.close(ours)
    shutil.rmtree(directory)

"""The size of the pool: it shrinks, and without shared memory all goes by frames."""

from __future__ import annotations

import errno
from typing import Any

import pytest
import torch

import zrpc
from tests.services.shm.conftest import Lend
from tests.services.shm.sharing import (
    LARGE,
    drop,
    keep,
    kept,
    large,
    negated,
    segments_mapped,
    segments_open,
    sends_by_segments,
    service_of,
    until_returned,
)
from tests.support.waiting import until
from zrpc.services.shm.segments import Segment
from zrpc.testing import Mesh
from zrpc.testing.plugin import MakeMesh

pytestmark = sends_by_segments

# -- the pool shrinks, and receivers forget ----------------------------------------------


@pytest.mark.system
def test_idle_segments_are_closed_and_forgotten(joined: Mesh) -> None:
    layer = service_of(joined, 0)
    zrpc.rpc_sync(1, keep, ("held", large(1)))
    for i in range(3):
        zrpc.rpc_sync(1, torch.numel, (large(i),))
    until_returned(layer, 1)
    layers = [service_of(joined, rank) for rank in range(len(joined))]
    for each in layers:  # the other has a pool, too
        each.idle_seconds = -1.0
    until(lambda: len(layer.pool) == layer.pool.lent == 1, collect=True)
    until(lambda: len(segments_open()) == 1, collect=True)
    for each in layers:
        each.idle_seconds = 10.0
    assert torch.equal(kept()["held"], large(1))
    drop("held")
    until_returned(layer)
    for i in range(3):
        assert torch.equal(zrpc.rpc_sync(1, negated, (large(i),)), -large(i))


# -- where there is no shared memory -----------------------------------------------------


def test_without_capacity_everything_goes_by_frames(make_mesh: MakeMesh, lends: list[Lend]) -> None:
    mesh = make_mesh(options={"shared_memory": 0})
    with mesh.agent(0).as_current():
        for i in range(4):
            assert torch.equal(zrpc.rpc_sync(1, negated, (large(i),)), -large(i))
    assert lends == []
    assert segments_open() == segments_mapped() == []


def test_if_the_descriptor_of_a_segment_cant_be_sent_the_message_goes_by_frames(
    joined: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, network = service_of(joined, 0), joined.agent(0).network

    def refuse(*_: Any) -> None:
        raise OSError(errno.ETOOMANYREFS, "it can't be sent")

    with monkeypatch.context() as patched:
        patched.setattr(network.descriptors, "send", refuse)
        for i in range(3):
            assert zrpc.rpc_sync(1, torch.numel, (large(i),)) == LARGE
        assert (layer.sent_bytes, layer.pool.lent, len(layer.pool)) == (0, 0, 1)
    assert torch.equal(zrpc.rpc_sync(1, negated, (large(4),)), -large(4))
    assert layer.sent_bytes == 4 * LARGE


def test_if_the_system_has_no_memory_for_a_segment_the_message_goes_by_frames(
    joined: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = service_of(joined, 0)
    refused = []

    def refuse(self: Segment, offset: int, buffer: Any) -> None:
        refused.append(self)
        raise OSError(errno.ENOSPC, "no memory left")

    write = Segment.write
    monkeypatch.setattr(Segment, "write", refuse)
    sent = layer.sent_bytes
    assert zrpc.rpc_sync(1, torch.numel, (large(3),)) == LARGE
    assert len(refused) == 1
    assert refused[0] not in layer.pool.segments.values()  # a part of it may have been written
    assert layer.sent_bytes == sent
    monkeypatch.setattr(Segment, "write", write)
    assert torch.equal(zrpc.rpc_sync(1, negated, (large(4),)), -large(4))
    assert layer.sent_bytes == sent + 4 * LARGE
    until_returned(layer)

"""Tensors in shared memory when a worker leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zrpc
from tests.services.shm.sharing import (
    drop,
    keep,
    kept,
    kept_are_equal,
    large,
    sends_by_segments,
    service_of,
    until_returned,
)
from tests.support.targets import echo
from tests.support.waiting import until
from zrpc.services.shm.segments import Segment
from zrpc.testing import Mesh

pytestmark = sends_by_segments


@pytest.mark.zrpc(workers=3)
def test_a_worker_that_leaves_keeps_its_tensors(joined: Mesh) -> None:
    ours = service_of(joined, 0)
    for i in range(3):
        zrpc.rpc_sync(1, keep, (i, large(i)))
    assert ours.pool.lent == 3
    joined.agent(1).shutdown(graceful=False)
    until(lambda: ours.pool.lent == 0, collect=True)
    for i in range(10, 16):
        assert torch.equal(zrpc.rpc_sync(2, torch.neg, (large(i),)), -large(i))
    assert kept_are_equal(3)
    kept()[0].zero_()
    assert torch.equal(kept()[1], large(1))
    with pytest.raises(zrpc.WorkerDied):
        zrpc.rpc_sync(1, echo, (large(1),))
    until_returned(ours)


@pytest.mark.zrpc(workers=3)
def test_tensors_of_a_worker_that_has_left_stay(joined: Mesh) -> None:
    zrpc.rpc_sync(1, send_from, (0, 3))
    joined.agent(1).shutdown(graceful=False)
    until(lambda: 1 in joined.agent(0).membership.lost, collect=True)
    joined.run(2, zrpc.rpc_sync, 0, torch.numel, (large(9),))
    assert kept_are_equal(3)
    drop(*range(3))
    until(lambda: not service_of(joined, 0).loans.open, collect=True)


def send_from(rank: Any, count: Any) -> None:
    for i in range(count):
        zrpc.rpc_sync(rank, keep, (i, large(i)))


def test_nothing_is_queued_for_a_worker_that_left_while_it_was_written(
    joined: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would ever drop it."""
    ours, network = service_of(joined, 0), joined.agent(0).network
    write = Segment.write

    def late(*arguments: Any) -> None:
        if network.knows(1):
            joined.agent(1).shutdown(graceful=False)
            until(lambda: not network.knows(1), collect=True)
        write(*arguments)

    monkeypatch.setattr(Segment, "write", late)
    with pytest.raises(zrpc.WorkerDied):
        zrpc.rpc_sync(1, echo, (large(1),))
    until(lambda: not network.knows(1), within=3, collect=True)
    until(lambda: ours.pool.lent == 0)

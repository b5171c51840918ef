"""Tensors in shared memory when a worker leaves, or is killed at any moment."""

from __future__ import annotations

import os
import signal
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
    own_layer,
    processes,
    segments_mapped,
    segments_open,
    send_on,
    sends_by_segments,
    service_of,
    until_returned,
)
from tests.support.targets import echo
from tests.support.waiting import until
from zrpc.services.shm import borrowed
from zrpc.services.shm.segments import Segment
from zrpc.testing import Mesh

pytestmark = sends_by_segments


def send_and_lend(rank: Any, count: Any) -> Any:
    for i in range(count):
        zrpc.rpc_sync(rank, keep, (i, large(i)))
    return own_layer().pool.lent


def until_lost(rank: Any) -> None:
    layer = own_layer()
    until(lambda: rank in layer.agent.membership.lost and layer.pool.lent == 0, collect=True)


def numbers_of_free_segments() -> Any:
    return sorted(own_layer().pool.segments)


def drop_all() -> Any:
    """Drops what is kept; returns what is mapped then."""
    kept().clear()
    until(lambda: not own_layer().loans.open, collect=True)
    return segments_mapped()


@processes
@pytest.mark.zrpc(workers=3)
def test_the_receiver_is_killed_while_it_holds_tensors(mesh: Mesh) -> None:
    assert mesh.run(0, send_and_lend, 1, 4) == 4
    lent = set(mesh.run(0, numbers_of_free_segments))
    mesh.kill(1)
    mesh.run(0, until_lost, 1)
    used = mesh.run(0, send_on, 2, 5)
    assert used
    # What it had is closed; of the segments before, only such as were free may be used again.
    assert len(used & lent) <= len(lent) - 4
    mesh.run(2, send_on, 0, 3)
    assert mesh.run(0, lambda: len(segments_open())) <= 6


@processes
@pytest.mark.zrpc(workers=3)
def test_the_sender_is_killed_while_receivers_hold_tensors(mesh: Mesh) -> None:
    mesh.run(0, send_and_lend, 1, 4)
    mesh.run(0, send_and_lend, 2, 4)
    its = set(mesh.run(0, segments_open))
    mesh.kill(0)
    for rank in (1, 2):
        mesh.run(rank, until_lost, 0)
    mesh.run(1, send_on, 2, 5)
    mesh.run(2, send_on, 1, 5)
    for rank in (1, 2):
        assert mesh.run(rank, kept_are_equal, 4)
        assert its & set(mesh.run(rank, segments_mapped))
        assert not its & set(mesh.run(rank, drop_all))


def ask_one_that_dies_before_its_answer_is_read(rank: Any, pid: Any) -> Any:
    map_it = borrowed._map
    tried = []

    def late(fd: Any) -> Any:
        os.kill(pid, signal.SIGKILL)
        until(lambda: not os.path.exists(f"/proc/{pid}/fd/0"))
        tried.append(fd)
        return map_it(fd)

    borrowed._map = late
    try:
        answer = zrpc.rpc_sync(rank, large, (1,))
        return len(tried), answer.equal(large(1))
    finally:
        borrowed._map = map_it


@processes
def test_an_answer_that_is_read_after_its_sender_was_killed_is_not_lost(mesh: Mesh) -> None:
    asked = mesh.submit(0, ask_one_that_dies_before_its_answer_is_read, 1, mesh.pid(1))
    assert asked.result() == (1, True)
    mesh.kill(1)


# -- workers that leave --------------------------------------------------------------------


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

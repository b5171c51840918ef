"""Large tensors and arrays between workers of one host: they arrive, and by shared memory."""

from __future__ import annotations

import asyncio
import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import zrpc
from tests.services.shm.conftest import Lend
from tests.services.shm.sharing import (
    LARGE,
    MIB,
    drop,
    keep,
    kept,
    large,
    make,
    negated,
    segments_mapped,
    segments_open,
    sends_by_segments,
    service_of,
    until_returned,
)
from tests.support.targets import echo
from tests.support.waiting import until
from zrpc.testing import Mesh
from zrpc.testing.plugin import MakeMesh

pytestmark = sends_by_segments


def equal(a: Any, b: Any) -> Any:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


# -- what arrives, and how ---------------------------------------------------------------


def test_arguments_and_results_go_by_shared_memory(joined: Mesh, lends: list[Lend]) -> None:
    for i in range(5):
        result = zrpc.rpc_sync(1, negated, (large(i),))
        assert torch.equal(result, -large(i))
    ours, theirs = (service_of(joined, rank).pool for rank in range(2))
    assert [lend.pool for lend in lends] == [ours, theirs] * 5
    assert [lend.borrower for lend in lends] == [1, 0] * 5
    assert {tuple(lend.sizes) for lend in lends} == {(4 * LARGE,)}


async def means_from_a_coroutine(count: Any) -> Any:
    """Calls of which only the first finds room, and of a tensor that changes meanwhile."""
    tensor = torch.zeros(LARGE)
    futures = []
    for number in range(count):
        tensor.fill_(number)
        futures.append(zrpc.rpc_async(1, torch.mean, (tensor,)))
    return [(await future).item() for future in futures]


def test_calls_that_wait_for_room_share_memory(make_mesh: MakeMesh, lends: list[Lend]) -> None:
    mesh = make_mesh(options={"max_bytes_in_flight": 4 * LARGE})
    with mesh.agent(0).as_current():
        assert mesh.run(0, asyncio.run, means_from_a_coroutine(8)) == list(range(8))
    assert [lend.sizes for lend in lends] == [[4 * LARGE]] * 8


def test_small_tensors_go_by_frames(joined: Mesh, lends: list[Lend]) -> None:
    assert equal(zrpc.rpc_sync(1, echo, (torch.ones(100),)), torch.ones(100))
    assert equal(zrpc.rpc_sync(1, echo, (torch.ones(8000),)), torch.ones(8000))
    assert lends == []


def test_many_tensors_in_one_message_share_a_segment(joined: Mesh, lends: list[Lend]) -> None:
    sent = {f"t{i}": large(i, 50_000 + i) for i in range(20)} | {"small": torch.ones(3)}
    received = zrpc.rpc_sync(1, echo, (sent,))
    assert received.keys() == sent.keys()
    assert all(equal(received[name], tensor) for name, tensor in sent.items())
    assert [len(lend.sizes) for lend in lends] == [20, 20]
    theirs = service_of(joined, 1)
    del received["t3"]
    gc.collect()
    zrpc.rpc_sync(1, max, (1, 2))  # the I/O thread has looked since
    assert theirs.pool.lent == 1
    received.clear()
    until_returned(theirs)


# -- the end -----------------------------------------------------------------------------


def test_tensors_outlive_both_agents(make_mesh: MakeMesh) -> None:
    mesh = make_mesh()
    with mesh.agent(0).as_current():
        zrpc.rpc_sync(1, keep, ("argument", large(1)))
        result = zrpc.rpc_sync(1, make, (2,))
        array = zrpc.rpc_sync(1, echo, (np.arange(LARGE),))
        assert service_of(mesh, 1).pool.lent == 2
    mesh.shutdown()
    assert segments_open() == [] or len(segments_open()) == len(segments_mapped()) == 3
    assert torch.equal(kept()["argument"], large(1))
    assert torch.equal(result, large(2))
    np.testing.assert_array_equal(array, np.arange(LARGE))
    result.zero_()
    assert torch.equal(kept()["argument"], large(1))
    drop("argument")
    del result, array
    until(lambda: segments_open() == segments_mapped() == [], collect=True)


# -- many at once ------------------------------------------------------------------------


@pytest.mark.system
@pytest.mark.zrpc(workers=3, options={"shared_memory": 12 * MIB})
def test_eight_threads_send_to_two_peers_at_once(joined: Mesh, lends: list[Lend]) -> None:
    def work(seed: int) -> int:
        rank = 1 + seed % 2
        held = []
        with joined.agent(0).as_current():
            for i in range(8):
                value = seed * 100 + i
                count = (LARGE >> (seed % 3)) + 13 * i
                sent = large(value, count)
                future = zrpc.rpc_async(rank, negated, (sent,))
                sent.zero_()  # it has left
                held.append((future.wait(), value, count))
                if i % 3 == 2:
                    held.pop(0)
                for received, v, c in held:
                    assert torch.equal(received, -large(v, c)), (seed, i, v)
        return len(held)

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(work, range(8))) == [6] * 8
    assert len(lends) > 16
    for rank in range(3):
        until_returned(service_of(joined, rank))
        assert service_of(joined, rank).pool.size <= 12 * MIB

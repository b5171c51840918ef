"""What a worker holds in a segment: lent to many without a copy, used again when all are done."""

from __future__ import annotations

import gc

import pytest
import torch

import zrpc
from tests.services.shm.sharing import (
    MIB,
    drop,
    keep,
    kept,
    segments_mapped,
    segments_open,
    service_of,
    until_returned,
)
from tests.support.waiting import until
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=3, timeout=90, options={"rpc_timeout": 40})


def held(mesh: Mesh, value: int, size: int = MIB) -> torch.Tensor:
    """A tensor that worker0 holds in a segment."""
    tensor = torch.frombuffer(service_of(mesh, 0).hold(size), dtype=torch.uint8)
    return tensor.fill_(value)


def test_what_is_held_goes_to_many_peers_by_one_segment(joined: Mesh) -> None:
    tensor = held(joined, 7)
    for rank in (1, 2):
        zrpc.rpc_sync(rank, keep, (f"got{rank}", tensor))
    assert len(segments_mapped()) == len(segments_open()) == 1
    tensor[0] = 8  # the same memory
    assert [int(kept()[f"got{rank}"][0]) for rank in (1, 2)] == [8, 8]


def test_a_segment_is_used_again_when_nobody_has_it(joined: Mesh) -> None:
    layer = service_of(joined, 0)
    tensor = held(joined, 1)
    zrpc.rpc_sync(1, keep, ("got", tensor))
    address = tensor.data_ptr()
    del tensor
    gc.collect()
    other = held(joined, 2)  # the peer still has the first
    assert other.data_ptr() != address
    assert int(kept()["got"][0]) == 1
    drop("got")
    until_returned(layer)
    assert held(joined, 3).data_ptr() == address


def test_parts_of_what_is_held_arrive_in_their_places(joined: Mesh) -> None:
    tensor = held(joined, 0)
    tensor.view(torch.int32).copy_(torch.arange(MIB // 4))
    parts = [tensor[: MIB // 2], tensor[MIB // 2 :]]
    sent = service_of(joined, 0).sent_bytes
    back = zrpc.rpc_sync(1, torch.cat, (parts,))
    assert torch.equal(back, tensor)
    assert service_of(joined, 0).sent_bytes == sent + MIB
    assert len(service_of(joined, 0).pool) == 1


def test_what_is_held_outlives_the_loss_of_a_peer_that_has_it(joined: Mesh) -> None:
    tensor = held(joined, 1)
    layer = service_of(joined, 0)
    for rank in (1, 2):
        zrpc.rpc_sync(rank, keep, (f"got{rank}", tensor))
    joined.agent(1).close()
    until(lambda: layer.pool.lent == 1 and len(layer.agent.membership.lost) == 1)
    zrpc.rpc_sync(2, keep, ("again", tensor))
    drop("got2", "again")
    del tensor
    until(lambda: len(layer.pool) == 0, collect=True)  # the lost peer may go on reading
    assert int(held(joined, 2)[0]) == 2
    assert int(kept()["got1"][0]) == 1


def test_if_there_is_no_room_to_hold_something_the_error_names_the_limit(joined: Mesh) -> None:
    limit = joined.agent(0).options.shared_memory
    with pytest.raises(MemoryError, match=f"found 0 bytes in use of {limit:,}"):
        service_of(joined, 0).hold(limit + 1)
    assert int(held(joined, 1)[0]) == 1


def test_after_the_end_of_the_worker_nothing_can_be_held(joined: Mesh) -> None:
    tensor = held(joined, 1)
    layer = service_of(joined, 0)
    joined.agent(0).close()
    with pytest.raises(zrpc.NotInitializedError):
        layer.hold(MIB)
    assert int(tensor[-1]) == 1  # as long as somebody reads it
    del tensor
    until(lambda: segments_mapped() == [], collect=True)

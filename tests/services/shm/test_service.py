"""What goes by shared memory between workers of one host, and how long its segments are lent."""

from __future__ import annotations

import asyncio
import errno
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
    segments_mapped,
    segments_open,
    sends_by_segments,
    service_of,
    until_returned,
)
from tests.support.descriptors import few_descriptors
from tests.support.gates import Gate
from tests.support.targets import echo
from tests.support.waiting import until
from zrpc.runtime.resource_limits import advice
from zrpc.services.shm.segments import MAX_SEGMENTS, Segment
from zrpc.testing import Mesh
from zrpc.testing.plugin import MakeMesh

pytestmark = sends_by_segments


def equal(a: Any, b: Any) -> Any:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


# -- what arrives, and how ---------------------------------------------------------------


def test_arguments_and_results_go_by_shared_memory(joined: Mesh, lends: list[Lend]) -> None:
    for i in range(5):
        result = zrpc.rpc_sync(1, torch.neg, (large(i),))
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


# -- the end -----------------------------------------------------------------------------


def test_tensors_outlive_both_agents(make_mesh: MakeMesh) -> None:
    mesh = make_mesh()
    with mesh.agent(0).as_current():
        zrpc.rpc_sync(1, keep, ("argument", large(1)))
        result = zrpc.rpc_sync(1, large, (2,))
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
                future = zrpc.rpc_async(rank, torch.neg, (sent,))
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


# -- with which message a segment is returned ----------------------------------------------

FUNCTIONS = [torch.numel, lambda t: t.numel(), torch.neg, lambda t: t.numpy().size]


def test_arguments_are_returned_with_the_answer(joined: Mesh, lends: list[Lend]) -> None:
    ours = service_of(joined, 0)
    for function in FUNCTIONS:
        for i in range(3):
            zrpc.rpc_sync(1, function, (large(i),))
            assert ours.pool.lent == 0
    zrpc.rpc_sync(1, lambda *, t: t.numel(), kwargs={"t": large(0)})
    assert ours.pool.lent == 0
    assert len({lend.number for lend in lends if lend.pool is ours.pool}) == 1


def test_results_are_returned_with_the_next_call(joined: Mesh, lends: list[Lend]) -> None:
    for i in range(5):
        received = zrpc.rpc_sync(1, large, (i,))
        del received
    assert len({lend.number for lend in lends}) == 1


def test_what_cant_be_returned_with_an_answer_is_returned_by_itself(joined: Mesh) -> None:
    for i in range(3):
        zrpc.rpc_sync(1, keep, (i, large(i)))


@pytest.mark.zrpc(workers=3)
def test_segments_of_one_worker_are_not_returned_with_messages_to_another(joined: Mesh) -> None:
    zrpc.rpc_sync(1, keep, (0, large(0)))
    joined.run(2, zrpc.rpc_sync, 1, keep, (1, large(1)))
    drop(0, 1)
    zrpc.rpc_sync(1, echo, (2,))
    until_returned(service_of(joined, 0))
    until_returned(service_of(joined, 2))


@pytest.mark.system
def test_a_receiver_that_keeps_everything_gets_frames_when_the_pool_is_full(
    make_mesh: MakeMesh, lends: list[Lend]
) -> None:
    mesh = make_mesh(options={"shared_memory": 4 * MIB + MIB // 4})
    lends.clear()
    layer = service_of(mesh, 0)
    with mesh.agent(0).as_current():
        for i in range(12):
            zrpc.rpc_sync(1, keep, (i, large(i)))
            assert layer.pool.size <= 4 * MIB + MIB // 4
        assert all(torch.equal(kept()[i], large(i)) for i in range(12))
        assert len({lend.number for lend in lends}) == len(lends) == layer.pool.lent == 4
        for i in range(12):
            kept()[i].fill_(i)
        assert all(kept()[i].sum() == i * LARGE for i in range(12))
        # One is dropped: its segment is used, and the others' are not.
        number = lends[2].number
        kept()[2] = None
        until_returned(layer, 3)
        zrpc.rpc_sync(1, keep, ("new", large(99)))
        assert lends[-1].number == number
        assert torch.equal(kept()["new"], large(99))
        assert all(kept()[i].sum() == i * LARGE for i in range(12) if i != 2)
        kept().clear()
        until_returned(layer)


@pytest.mark.system
def test_a_late_answer_returns(
    joined: Mesh, lends: list[Lend], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The callee must not find out first that nobody waits any more: it would not answer then.
    monkeypatch.setattr(joined.agent(1).callee, "drop_abandoned", lambda: None)
    with Gate() as gate:
        future = zrpc.rpc_async(1, gate.wait_inside, (large(1),), timeout=0.3)
        gate.await_entry()
        with pytest.raises(zrpc.RpcTimeoutError):
            future.wait()
    theirs = service_of(joined, 1)
    until(lambda: any(lend.pool is theirs.pool for lend in lends), collect=True)
    until_returned(theirs)


class CantBeFound:
    """Something whose unpickling fails at the receiver, with its tensors not looked at."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __reduce__(self) -> Any:
        return explode, (self.tensor,)


def explode(tensor: Any) -> None:
    raise LookupError("there is no such thing here")


def test_a_request_that_cant_be_unpickled_is_returned(joined: Mesh, lends: list[Lend]) -> None:
    for _ in range(3):
        with pytest.raises(zrpc.SerializationError, match="no such thing"):
            zrpc.rpc_sync(1, echo, (CantBeFound(large(1)),))
    assert len(lends) == 3


# -- the size of the pool ----------------------------------------------------------------


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
        assert torch.equal(zrpc.rpc_sync(1, torch.neg, (large(i),)), -large(i))


# -- where there is no shared memory -----------------------------------------------------


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
    assert torch.equal(zrpc.rpc_sync(1, torch.neg, (large(4),)), -large(4))
    assert layer.sent_bytes == 4 * LARGE


def test_if_the_system_has_no_memory_for_a_segment_the_message_goes_by_frames(
    joined: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = service_of(joined, 0)
    refused = []

    def refuse(self: Segment, offset: int, buffer: Any) -> None:
        refused.append(self)
        raise OSError(errno.ENOSPC, "no memory left")

    with monkeypatch.context() as patched:
        patched.setattr(Segment, "write", refuse)
        assert zrpc.rpc_sync(1, torch.numel, (large(3),)) == LARGE
    assert len(refused) == 1
    assert refused[0] not in layer.pool.segments.values()  # a part of it may have been written
    assert layer.sent_bytes == 0
    assert torch.equal(zrpc.rpc_sync(1, torch.neg, (large(4),)), -large(4))
    assert layer.sent_bytes == 4 * LARGE


# -- what a worker holds: lent to many without a copy, used again when all are done ------


def held(mesh: Mesh, value: int, size: int = MIB) -> torch.Tensor:
    """A tensor that worker0 holds in a segment."""
    tensor = torch.frombuffer(service_of(mesh, 0).hold(size), dtype=torch.uint8)
    return tensor.fill_(value)


@pytest.mark.zrpc(workers=3)
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


@pytest.mark.zrpc(workers=3)
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
    limit, hold = joined.agent(0).options.shared_memory, service_of(joined, 0).hold
    with pytest.raises(MemoryError, match=f"found 0 bytes in use of {limit:,}"):
        hold(limit + 1)
    with few_descriptors(), pytest.raises(MemoryError, match="Too many open files") as info:
        hold(MIB)
    assert "ulimit -n" in str(advice(info.value))
    buffers = [hold(1) for _ in range(MAX_SEGMENTS)]
    with pytest.raises(MemoryError, match=f"found {MAX_SEGMENTS} segments in use, which is the"):
        hold(1)
    del buffers
    assert int(held(joined, 1)[0]) == 1

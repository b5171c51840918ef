"""Large tensors and arrays between workers of one host: they arrive, by shared memory, and are
nobody else's."""

from __future__ import annotations

import asyncio
import gc
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import zrpc
import zrpc.autograd as dist_autograd
from tests.services.shm.conftest import Lend
from tests.services.shm.sharing import (
    LARGE,
    MIB,
    drop,
    introduce,
    keep,
    kept,
    large,
    own_layer,
    segments_mapped,
    segments_open,
    service_of,
    until_returned,
)
from tests.support.targets import echo
from tests.support.waiting import until
from zrpc.services.shm.borrowed import Loans
from zrpc.services.shm.segments import supports_segments
from zrpc.services.shm.service import SharedMemoryTiming
from zrpc.testing import Mesh
from zrpc.testing.plugin import MakeMesh

pytestmark = [
    pytest.mark.skipif(not supports_segments(), reason="needs memfds"),
    pytest.mark.zrpc(workers=2, timeout=90, options={"rpc_timeout": 40}),
]


def negated(tensor: Any) -> Any:
    return -tensor


def twice(tensor: Any) -> Any:
    return [tensor, tensor]


def add_in_place(tensor: Any, number: Any) -> Any:
    tensor += number
    return tensor.sum().item()


def make(value: Any, count: Any = LARGE) -> Any:
    return large(value, count)


def sum_of_kept(name: Any) -> Any:
    return kept()[name].double().sum().item()


def buffer(i: Any) -> Any:
    return pickle.PickleBuffer(bytearray([i]) * MIB)


def views_of(count: Any) -> Any:
    base = large(1, count)
    return base[: count // 2].view(-1, 8), base


def equal(a: Any, b: Any) -> Any:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


# -- what arrives, and how ---------------------------------------------------------------


def test_arguments_and_results_go_by_shared_memory_both_ways(
    introduced: Mesh, lends: list[Lend]
) -> None:
    for i in range(5):
        result = zrpc.rpc_sync(1, negated, (large(i),))
        assert torch.equal(result, -large(i))
    ours, theirs = (service_of(introduced, rank).pool for rank in range(2))
    assert [lend.pool for lend in lends] == [ours, theirs] * 5
    assert [lend.borrower for lend in lends] == [1, 0] * 5
    assert {tuple(lend.sizes) for lend in lends} == {(4 * LARGE,)}


def test_the_first_message_goes_by_frames_and_a_later_one_by_shared_memory(
    mesh: Mesh, lends: list[Lend]
) -> None:
    with mesh.agent(0).as_current():
        ours, theirs = (service_of(mesh, rank) for rank in range(2))
        assert segments_open() == []
        assert torch.equal(zrpc.rpc_sync(1, negated, (large(0),)), -large(0))
        assert all(lend.sizes != [4 * LARGE] for lend in lends if lend.pool is ours.pool)
        for i in range(1, 1000):
            assert torch.equal(zrpc.rpc_sync(1, negated, (large(i),)), -large(i))
            by = {lend.pool for lend in lends if lend.sizes == [4 * LARGE]}
            if by == {ours.pool, theirs.pool}:
                break
        assert by == {ours.pool, theirs.pool}
        until_returned(ours)
        until_returned(theirs)


def test_segments_are_used_again(introduced: Mesh, lends: list[Lend]) -> None:
    pool = service_of(introduced, 0).pool
    for i in range(8):
        assert zrpc.rpc_sync(1, torch.numel, (large(i),)) == LARGE
        until_returned(service_of(introduced, 0))
    assert len({lend.number for lend in lends}) == 1
    assert pool.size <= 2 * 4 * LARGE + MIB


async def means_from_a_coroutine(count: Any) -> Any:
    """Calls of which only the first finds room, and of a tensor that changes meanwhile."""
    tensor = torch.zeros(LARGE)
    futures = []
    for number in range(count):
        tensor.fill_(number)
        futures.append(zrpc.rpc_async(1, torch.mean, (tensor,)))
    return [(await future).item() for future in futures]


def test_calls_of_a_coroutine_that_wait_for_room_go_by_shared_memory(
    make_mesh: MakeMesh, lends: list[Lend]
) -> None:
    mesh = make_mesh(options={"max_bytes_in_flight": 4 * LARGE})
    with mesh.agent(0).as_current():
        introduce(1)
        lends.clear()
        assert mesh.run(0, asyncio.run, means_from_a_coroutine(8)) == list(range(8))
    assert [lend.sizes for lend in lends] == [[4 * LARGE]] * 8


def test_small_tensors_go_by_frames(introduced: Mesh, lends: list[Lend]) -> None:
    assert equal(zrpc.rpc_sync(1, echo, (torch.ones(100),)), torch.ones(100))
    assert equal(zrpc.rpc_sync(1, echo, (torch.ones(8000),)), torch.ones(8000))
    assert lends == []


def test_many_tensors_in_one_message_share_a_segment(introduced: Mesh, lends: list[Lend]) -> None:
    sent = {f"t{i}": large(i, 50_000 + i) for i in range(20)} | {"small": torch.ones(3)}
    received = zrpc.rpc_sync(1, echo, (sent,))
    assert received.keys() == sent.keys()
    assert all(equal(received[name], tensor) for name, tensor in sent.items())
    assert [len(lend.sizes) for lend in lends] == [20, 20]
    theirs = service_of(introduced, 1)
    del received["t3"]
    gc.collect()
    zrpc.rpc_sync(1, max, (1, 2))  # the I/O thread has looked since
    assert theirs.pool.lent == 1
    received.clear()
    until_returned(theirs)


@pytest.mark.parametrize(
    "tensor",
    [
        large(1)[1000:-1000],
        large(1).view(512, 512)[:, 3:500],
        large(1).view(512, 512).t(),
        large(1, 4 * LARGE).view(1024, 1024)[::2, ::3],
        large(1)[1:],  # not aligned
        large(1).expand(2, LARGE),
        large(1).to(torch.bfloat16),
        torch.arange(LARGE) % 2 == 0,
        torch.complex(large(1), large(2)).conj(),
        torch.nn.Parameter(large(1)),
        large(1).to_sparse(),
        large(1).view(512, 512).to_sparse_csr(),
    ],
    ids=[
        "slice",
        "columns",
        "transposed",
        "steps",
        "odd start",
        "expanded",
        "bfloat16",
        "bool",
        "conjugate",
        "parameter",
        "sparse",
        "csr",
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_tensors_of_all_kinds_arrive_equal(
    introduced: Mesh, lends: list[Lend], tensor: Any
) -> None:
    received = zrpc.rpc_sync(1, echo, (tensor,))
    assert type(received) is type(tensor)
    assert received.layout == tensor.layout
    assert received.requires_grad == tensor.requires_grad
    assert equal(received.to_dense(), tensor.to_dense())
    assert {lend.borrower for lend in lends} == {0, 1}


def test_tensors_that_share_storage_share_it_on_arrival(
    introduced: Mesh, lends: list[Lend]
) -> None:
    view, base = zrpc.rpc_sync(1, views_of, (LARGE,))
    assert torch.equal(base, large(1))
    assert torch.equal(view, large(1)[: LARGE // 2].view(-1, 8))
    assert [lend.sizes for lend in lends] == [[4 * LARGE]]
    view[0, 0] = -7
    assert base[0] == -7


@pytest.mark.parametrize("read_only", [False, True])
def test_arrays(introduced: Mesh, lends: list[Lend], read_only: bool) -> None:
    def array(value: Any) -> Any:
        made = np.arange(LARGE, dtype=np.float64).reshape(8, -1) * value
        made.flags.writeable = not read_only
        return made

    held = []
    for i in range(4):
        held.append(zrpc.rpc_sync(1, echo, (array(i),)))
        for j, received in enumerate(held):
            np.testing.assert_array_equal(received, array(j))
            assert received.flags.writeable is not read_only
    if not read_only:
        assert {lend.borrower for lend in lends} == {0, 1}
        held[0][:] = -1
        np.testing.assert_array_equal(held[1], array(1))
        del received
        lent = service_of(introduced, 1)
        assert lent.pool.lent == 4
        rows = [held.pop()[3] for _ in range(2)]
        held.clear()
        until_returned(lent, 2)
        zrpc.rpc_sync(1, echo, (array(9),))
        assert [row[1] for row in rows] == [(3 * LARGE / 8 + 1) * j for j in (3, 2)]
        rows.clear()
        until_returned(lent)


def test_arrays_read_only_arrays_and_tensors_in_one_message(
    introduced: Mesh, lends: list[Lend]
) -> None:
    fixed = np.arange(50_000)
    fixed.flags.writeable = False
    sent = [large(1), fixed, np.arange(60_000), torch.ones(5), fixed[::2], large(2), b"x" * 40_000]
    received = zrpc.rpc_sync(1, echo, (sent,))
    for got, was in zip(received, sent, strict=True):
        assert type(got) is type(was)
        assert bytes(memoryview(np.ascontiguousarray(got))) == bytes(
            memoryview(np.ascontiguousarray(was))
        )
    assert len(lends) == 2
    assert not received[1].flags.writeable


def test_a_memoryview_of_a_buffer_keeps_its_bytes(introduced: Mesh) -> None:
    def part(i: Any) -> Any:
        return memoryview(zrpc.rpc_sync(1, buffer, (i,)))[10:20]

    parts = [part(i) for i in range(6)]
    assert [bytes(part) for part in parts] == [bytes([i]) * 10 for i in range(6)]
    parts.clear()
    until_returned(service_of(introduced, 1))


def test_a_buffer_is_lent_as_long_as_anything_of_it_is_used(
    introduced: Mesh, lends: list[Lend]
) -> None:
    lent = service_of(introduced, 1)
    received = zrpc.rpc_sync(1, buffer, (7,))
    assert type(received) is memoryview
    assert lent.pool.lent == 1
    part = received[10:20]
    number = memoryview(received)[8:16].cast("q")
    again = zrpc.rpc_sync(1, echo, (received,))  # sent on
    assert {lend.borrower for lend in lends} == {0, 1}
    received.release()
    del received
    for i in range(4):
        assert bytes(zrpc.rpc_sync(1, buffer, (i,))[:1]) == bytes([i])
    assert bytes(part) == bytes([7]) * 10
    assert bytes(again) == bytes([7]) * MIB
    assert lent.pool.lent >= 2
    del part, again
    until_returned(lent, 1)
    zrpc.rpc_sync(1, buffer, (9,))
    assert bytes(number) == bytes([7]) * 8
    del number
    until_returned(lent)


def test_rref_fetch_and_proxy(introduced: Mesh, lends: list[Lend]) -> None:
    rref = zrpc.remote(1, make, (3,))
    first, second = rref.to_here(), rref.to_here()
    assert torch.equal(first, large(3))
    first.zero_()
    assert torch.equal(second, large(3))
    assert torch.equal(rref.to_here(), large(3))
    assert torch.equal(rref.rpc_sync().clone(), large(3))
    theirs = service_of(introduced, 1).pool
    assert [lend.pool for lend in lends] == [theirs] * 4
    mine = zrpc.remote(1, echo, (large(4),))
    assert torch.equal(mine.to_here(), large(4))
    assert service_of(introduced, 0).pool.lent == 1  # the owner's value lies in our segment
    del mine
    until_returned(service_of(introduced, 0))


def test_gradients(introduced: Mesh, lends: list[Lend]) -> None:
    leaf = large(1).mul_(1e-3).requires_grad_()
    with dist_autograd.context() as context_id:
        loss = (zrpc.rpc_sync(1, torch.mul, (leaf, leaf)) * 2).sum()
        dist_autograd.backward(context_id, [loss])
        gradient = dist_autograd.get_gradients(context_id)[leaf]
        assert torch.allclose(gradient, 4 * leaf.detach())
    # There: the leaf and the gradient of the product; back: the product and two gradients.
    ours, theirs = (service_of(introduced, rank).pool for rank in range(2))
    assert sum(lend.pool is ours for lend in lends) >= 2
    assert sum(lend.pool is theirs for lend in lends) >= 2
    del loss, gradient
    for rank in range(2):
        until_returned(service_of(introduced, rank))


def test_an_asynchronous_result_waits_in_its_future(introduced: Mesh) -> None:
    futures = [zrpc.rpc_async(1, make, (i,)) for i in range(6)]
    for i, future in enumerate(futures):
        assert torch.equal(future.wait(), large(i))
        assert torch.equal(future.wait(), large(i))


def test_a_call_to_itself(introduced: Mesh) -> None:
    sent = large(1)
    received = zrpc.rpc_sync(0, negated, (sent,))
    assert torch.equal(received, -large(1))
    received.zero_()
    assert torch.equal(sent, large(1))


# -- nobody else sees what a holder writes -----------------------------------------------


def test_what_the_callee_writes_the_caller_does_not_see(
    introduced: Mesh, lends: list[Lend]
) -> None:
    sent = large(1, 1 << 17)
    for _ in range(3):
        total = zrpc.rpc_sync(1, add_in_place, (sent, 5))
        assert total == (large(1, 1 << 17) + 5).sum().item()
        assert torch.equal(sent, large(1, 1 << 17))
    assert len(lends) == 3


def test_what_the_sender_writes_later_the_receiver_does_not_see(introduced: Mesh) -> None:
    sent = large(1)
    zrpc.rpc_sync(1, keep, ("held", sent))
    sent.zero_()
    assert torch.equal(kept()["held"], large(1))
    drop("held")


@pytest.mark.zrpc(workers=4)
def test_receivers_of_one_tensor_do_not_see_each_other(introduced: Mesh, lends: list[Lend]) -> None:
    sent = large(1)
    for rank in range(1, 4):
        zrpc.rpc_sync(rank, keep, (rank, sent))
    assert sorted(lend.borrower for lend in lends) == [1, 2, 3]
    kept()[1].fill_(1)
    kept()[2].fill_(2)
    assert torch.equal(kept()[3], sent)
    assert torch.equal(sent, large(1))
    assert kept()[1].sum() == LARGE
    drop(1, 2, 3)
    until_returned(service_of(introduced, 0))


def test_one_tensor_twice_in_a_message_is_one_and_in_two_messages_two(introduced: Mesh) -> None:
    first, second = zrpc.rpc_sync(1, twice, (large(1),))
    other, _ = zrpc.rpc_sync(1, twice, (large(1),))
    first.zero_()
    assert second.sum() == 0
    assert torch.equal(other, large(1))


def test_what_is_written_to_a_returned_segment_is_not_in_the_next_message(
    introduced: Mesh, lends: list[Lend]
) -> None:
    for i in range(6):
        received = zrpc.rpc_sync(1, make, (i, LARGE - i))
        assert torch.equal(received, large(i, LARGE - i))
        received.fill_(float("nan"))
        del received
        until_returned(service_of(introduced, 1))
    assert len({lend.number for lend in lends}) == 1


# -- loans -------------------------------------------------------------------------------


HOLDS = {
    "tensor": lambda t: t,
    "slice": lambda t: t[100:101],
    "view": lambda t: t.view(-1, 4).t(),
    "detached": lambda t: t.detach(),
    "storage": lambda t: t.untyped_storage(),
    "array": lambda t: t.numpy(),
    "slice of an array": lambda t: t.numpy()[3:4],
    "graph": lambda t: t.requires_grad_().mul(t).grad_fn,
    "cycle": lambda t: (lambda cell: cell.append(cell) or cell)([t]),
}


@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS)
def test_a_loan_lasts_as_long_as_anything_of_the_tensor(
    introduced: Mesh, lends: list[Lend], hold: Any
) -> None:
    theirs = service_of(introduced, 1)
    received = zrpc.rpc_sync(1, make, (1,))
    held = hold(received)
    del received
    numbers = set()
    for i in range(2, 5):
        other = zrpc.rpc_sync(1, make, (i,))
        assert torch.equal(other, large(i))
        numbers.add(lends[-1].number)
        del other
        until_returned(theirs, 1)
    assert theirs.pool.lent == 1
    assert lends[0].number not in numbers
    del held
    until_returned(theirs)


def test_a_clone_does_not_hold_the_loan(introduced: Mesh) -> None:
    clone = zrpc.rpc_sync(1, make, (1,)).clone()
    until_returned(service_of(introduced, 1))
    zrpc.rpc_sync(1, make, (2,))
    assert torch.equal(clone, large(1))


FUNCTIONS = {
    "builtin": torch.numel,
    "python": lambda t: t.numel(),
    "large result": torch.neg,
    "keyword": lambda *, t: t.numel(),
    "array": lambda t: t.numpy().size,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_are_returned_with_the_answer(
    introduced: Mesh, lends: list[Lend], name: Any
) -> None:
    ours = service_of(introduced, 0)
    for i in range(5):
        if name == "keyword":
            zrpc.rpc_sync(1, FUNCTIONS[name], kwargs={"t": large(i)})
        else:
            zrpc.rpc_sync(1, FUNCTIONS[name], (large(i),))
        assert ours.pool.lent == 0
    assert len({lend.number for lend in lends if lend.pool is ours.pool}) == 1


def test_results_are_returned_with_the_next_call(introduced: Mesh, lends: list[Lend]) -> None:
    for i in range(5):
        received = zrpc.rpc_sync(1, make, (i,))
        del received
    assert len({lend.number for lend in lends}) == 1


def test_what_cant_be_returned_with_an_answer_is_returned_by_itself(introduced: Mesh) -> None:
    for i in range(3):
        zrpc.rpc_sync(1, keep, (i, large(i)))
    drop(0, 1, 2)
    until_returned(service_of(introduced, 0))


@pytest.mark.zrpc(workers=3)
def test_segments_of_one_worker_are_not_returned_with_messages_to_another(introduced: Mesh) -> None:
    introduced.run(0, introduce, 2)
    introduced.run(2, introduce, 1)
    zrpc.rpc_sync(1, keep, (0, large(0)))
    introduced.run(2, zrpc.rpc_sync, 1, keep, (1, large(1)))
    drop(0, 1)
    zrpc.rpc_sync(1, echo, (2,))
    until_returned(service_of(introduced, 0))
    until_returned(service_of(introduced, 2))


def test_a_receiver_that_keeps_everything_gets_frames_when_the_pool_is_full(
    make_mesh: MakeMesh, lends: list[Lend]
) -> None:
    mesh = make_mesh(options={"shared_memory": 4 * MIB + MIB // 4})
    mesh.run(0, introduce, 1)
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


def test_a_message_larger_than_the_pool_goes_by_frames(
    make_mesh: MakeMesh, lends: list[Lend]
) -> None:
    mesh = make_mesh(options={"shared_memory": 2 * MIB})
    mesh.run(0, introduce, 1)
    lends.clear()
    with mesh.agent(0).as_current():
        assert torch.equal(zrpc.rpc_sync(1, negated, (large(1, 1 << 20),)), -large(1, 1 << 20))
        ours = service_of(mesh, 0).pool
        assert [lend for lend in lends if lend.pool is ours] == []
        zrpc.rpc_sync(1, torch.numel, (large(1),))
        assert [lend.sizes for lend in lends if lend.pool is ours] == [[4 * LARGE]]


@pytest.mark.parametrize("end", ["collected", "kept"])
def test_a_late_answer_is_returned(
    introduced: Mesh, lends: list[Lend], end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, entered = threading.Event(), threading.Event()
    kept()["wait"] = (entered, gate)
    # The callee must not find out first that nobody waits any more: it would not answer then.
    callee = introduced.agent(1)
    monkeypatch.setattr(callee.callee, "drop_abandoned", lambda: None)

    future = zrpc.rpc_async(1, answer_late, timeout=0.3)
    assert entered.wait(20)
    with pytest.raises(zrpc.RpcTimeoutError):
        future.wait()
    if end == "collected":
        del future
    gate.set()
    theirs = service_of(introduced, 1)
    until(lambda: any(lend.pool is theirs.pool for lend in lends), collect=True)
    until_returned(theirs)


def answer_late() -> Any:
    entered, gate = kept()["wait"]
    entered.set()
    assert gate.wait(30)
    return large(1)


class CantBeFound:
    """Something whose unpickling fails at the receiver, with its tensors not looked at."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __reduce__(self) -> Any:
        return explode, (self.tensor,)


def explode(tensor: Any) -> None:
    raise LookupError("there is no such thing here")


def test_a_request_that_cant_be_unpickled_is_returned(introduced: Mesh, lends: list[Lend]) -> None:
    for _ in range(3):
        with pytest.raises(zrpc.SerializationError, match="no such thing"):
            zrpc.rpc_sync(1, echo, (CantBeFound(large(1)),))
    assert len(lends) == 3
    until_returned(service_of(introduced, 0))


def test_an_answer_that_nobody_asks_for_is_returned(introduced: Mesh, lends: list[Lend]) -> None:
    future = zrpc.rpc_async(1, make, (1,))
    until(lambda: lends, collect=True)
    del future
    until_returned(service_of(introduced, 1))


def test_an_answer_whose_call_failed_before_is_returned(
    introduced: Mesh, lends: list[Lend]
) -> None:
    with pytest.raises(ZeroDivisionError):
        zrpc.rpc_sync(1, fail_with, (large(1),))
    assert len(lends) == 1
    until_returned(service_of(introduced, 0))


def fail_with(tensor: Any) -> None:
    raise ZeroDivisionError


# -- the pool shrinks, and receivers forget ----------------------------------------------


def test_idle_segments_are_closed_and_forgotten(introduced: Mesh) -> None:
    layer = service_of(introduced, 0)
    zrpc.rpc_sync(1, keep, ("held", large(1)))
    for i in range(3):
        zrpc.rpc_sync(1, torch.numel, (large(i),))
    until_returned(layer, 1)
    layer.timing = SharedMemoryTiming(idle_seconds=-1.0)
    until(lambda: len(layer.pool) == layer.pool.lent == 1, collect=True)
    until(lambda: len(segments_open()) == 1, collect=True)
    layer.timing = SharedMemoryTiming()
    assert torch.equal(kept()["held"], large(1))
    drop("held")
    until_returned(layer)
    for i in range(3):
        assert torch.equal(zrpc.rpc_sync(1, negated, (large(i),)), -large(i))


def test_what_the_pool_closes_to_make_room_the_receivers_forget(make_mesh: MakeMesh) -> None:
    mesh = make_mesh(workers=3, options={"shared_memory": 3 * MIB})
    mesh.run(0, introduce, 1, 2)
    layer = service_of(mesh, 0)
    with mesh.agent(0).as_current():
        for i in range(12):
            for rank in (1, 2):
                count = LARGE // 4 + (i * 7 % 12) * LARGE // 12
                assert zrpc.rpc_sync(rank, torch.numel, (large(i, count),)) == count
            until_returned(layer)
        until(
            lambda: len(set(segments_mapped() + segments_open())) == len(layer.pool),
            lambda: f"{len(segments_mapped())} are mapped, {len(layer.pool)} are in the pool",
            within=5,
            collect=True,
        )


# -- where there is no shared memory -----------------------------------------------------


def test_without_capacity_everything_goes_by_frames(make_mesh: MakeMesh, lends: list[Lend]) -> None:
    mesh = make_mesh(options={"shared_memory": 0})
    with mesh.agent(0).as_current():
        for i in range(4):
            assert torch.equal(zrpc.rpc_sync(1, negated, (large(i),)), -large(i))
    assert lends == []
    assert segments_open() == segments_mapped() == []


def test_a_peer_that_cant_open_segments_gets_frames(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed = []

    def refuse(self, descriptor: Any) -> Any:
        probed.append(self)
        return False

    monkeypatch.setattr(Loans, "probe", refuse)
    with mesh.agent(0).as_current():
        for i in range(6):
            assert torch.equal(zrpc.rpc_sync(1, negated, (large(i),)), -large(i))
        until(lambda: len(probed) == 2, collect=True)
        for rank in range(2):
            until_returned(service_of(mesh, rank))
            assert not service_of(mesh, rank)._accepted
        assert torch.equal(zrpc.rpc_sync(1, negated, (large(7),)), -large(7))
    assert {id(loans) for loans in probed} == {id(service_of(mesh, r).loans) for r in range(2)}
    assert len(probed) == 2  # asked once
    assert segments_mapped() == segments_open()  # of the offers


def test_only_one_side_has_capacity(mesh: Mesh, lends: list[Lend]) -> None:
    service_of(mesh, 1).pool._capacity = 0
    mesh.run(0, introduce, 1)
    lends.clear()
    with mesh.agent(0).as_current():
        for i in range(3):
            assert torch.equal(zrpc.rpc_sync(1, negated, (large(i),)), -large(i))
    assert {lend.pool for lend in lends} == {service_of(mesh, 0).pool}
    assert len(lends) == 3


# -- the end -----------------------------------------------------------------------------


def test_tensors_outlive_both_agents(make_mesh: MakeMesh) -> None:
    mesh = make_mesh()
    mesh.run(0, introduce, 1)
    mesh.run(1, introduce, 0)
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


def test_meshes_come_and_go(make_mesh: MakeMesh, lends: list[Lend]) -> None:
    for i in range(4):
        mesh = make_mesh()
        mesh.run(0, introduce, 1)
        with mesh.agent(0).as_current():
            lends.clear()
            assert torch.equal(zrpc.rpc_sync(1, negated, (large(i),)), -large(i))
            assert lends
        mesh.shutdown()
        until(lambda: segments_open() == segments_mapped() == [], collect=True)


# -- many at once ------------------------------------------------------------------------


@pytest.mark.zrpc(workers=3, options={"shared_memory": 12 * MIB})
def test_eight_threads_send_to_two_peers_at_once(introduced: Mesh, lends: list[Lend]) -> None:
    def work(seed: int) -> int:
        rank = 1 + seed % 2
        held = []
        with introduced.agent(0).as_current():
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
        until_returned(service_of(introduced, rank))
        assert service_of(introduced, rank).pool.size <= 12 * MIB


@pytest.mark.zrpc(workers=4)
def test_all_workers_send_to_all(introduced: Mesh) -> None:
    def work() -> None:
        me = own_layer().agent.worker_info.id
        futures = [
            (zrpc.rpc_async(rank, negated, (large(me * 10 + rank + i),)), me * 10 + rank + i)
            for i in range(4)
            for rank in range(4)
        ]
        for future, value in futures:
            assert torch.equal(future.wait(), -large(value))

    introduced.run_all(work)
    for rank in range(4):
        until_returned(service_of(introduced, rank))

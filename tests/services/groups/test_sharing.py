"""Items that go to whichever member is free."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import zrpc
from tests.services.elastic.conftest import Elastic
from tests.services.groups.conftest import outcomes
from tests.support.gates import Gate
from tests.support.targets import echo
from tests.support.waiting import SOON, until
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=4, timeout=90, options={"rpc_timeout": 40})


def name(_: object) -> str:
    return zrpc.get_worker_info().name


def test_results_are_in_the_order_of_the_items(caller: Mesh) -> None:
    assert zrpc.rpc_sync(zrpc.group("*"), abs, (zrpc.share(range(0, -50, -1)),)) == [*range(50)]
    values = zrpc.remote(zrpc.group("*"), dict, ([("a", 1)],))
    assert values.rpc_sync().get(zrpc.share("aba")) == [1, None, 1]
    assert zrpc.rpc_sync(zrpc.group("*"), abs, (zrpc.share([]),)) == []


def test_a_member_that_is_busy_gets_no_more(caller: Mesh, gate: Gate) -> None:
    def work(item: int) -> str:
        return gate.wait_inside(name(item)) if item == 0 else name(item)

    future = zrpc.rpc_async(zrpc.group("worker[12]"), work, (zrpc.share(range(10)),))
    gate.await_entry()
    done = [part.wait() for part in future.parts[1:]]
    assert len(set(done)) == 1
    gate.open()
    assert future.wait() == [({"worker1", "worker2"} - set(done)).pop(), *done]


def test_a_member_has_one_item_at_a_time(caller: Mesh, gate: Gate) -> None:
    future = zrpc.rpc_async(zrpc.group("worker[12]"), gate.wait_inside, (zrpc.share(range(5)),))
    gate.await_entry(2)
    assert not gate.entered.acquire(timeout=0.1)
    gate.open()
    assert future.wait() == [*range(5)]


def test_items_that_fail(caller: Mesh) -> None:
    get, items = {0: "a", 3: "d"}.__getitem__, zrpc.share([0, 1, threading.Lock(), 3])
    with pytest.raises(zrpc.GroupError, match="2 of 4 items failed: item 1: KeyError") as caught:
        zrpc.rpc_sync(zrpc.group("*"), get, (items,))
    assert sorted(caught.value.errors) == [1, 2]
    assert isinstance(caught.value.errors[2], zrpc.SerializationError)
    assert "found one of type lock" in str(caught.value.errors[2])
    assert caught.value.results == {0: "a", 3: "d"}


def test_a_deadline_for_all_items(caller: Mesh, gate: Gate) -> None:
    with pytest.raises(zrpc.GroupError) as caught:
        zrpc.rpc_sync(
            zrpc.group("worker[12]"), gate.wait_inside, (zrpc.share(range(5)),), timeout=0.3
        )
    errors = caught.value.errors
    assert {type(error) for error in errors.values()} == {zrpc.RpcTimeoutError}
    assert [errors[item].executed for item in (2, 3, 4)] == [False] * 3  # type: ignore[attr-defined]
    gate.open()


def test_cancelling_gives_out_no_more_items(caller: Mesh, gate: Gate) -> None:
    future = zrpc.rpc_async(zrpc.group("worker[12]"), gate.wait_inside, (zrpc.share(range(9)),))
    gate.await_entry(2)
    assert future.cancel()
    with pytest.raises(zrpc.RpcCancelledError):
        future.wait()
    assert all(part.cancelled() for part in future.parts)
    gate.open()
    assert not gate.entered.acquire(timeout=0.05)
    until(lambda: not zrpc.stats().calls_in_flight)


def test_an_item_that_is_cancelled_is_not_begun(caller: Mesh, gate: Gate) -> None:
    future = zrpc.rpc_async(zrpc.group("worker[12]"), gate.wait_inside, (zrpc.share(range(4)),))
    gate.await_entry(2)
    assert future.parts[2].cancel()
    gate.open()
    assert outcomes(future.wait) == [0, 1, zrpc.RpcCancelledError, 3]


def test_items_are_shared_in_a_context(caller: Mesh) -> None:
    weight = torch.ones(2, requires_grad=True)
    with zrpc.autograd.context() as context:
        found = zrpc.rpc_sync(
            zrpc.group("*"), lambda w, i: (w * i).sum(), (weight, zrpc.share([1.0, 2.0, 3.0]))
        )
        zrpc.autograd.backward(context, [torch.stack(found).sum()])
        assert zrpc.autograd.get_gradients(context)[weight].tolist() == [6.0, 6.0]


def test_share_is_alone_in_a_call_and_needs_members_and_results(caller: Mesh) -> None:
    group = zrpc.group("*")
    for other in (zrpc.share([2]), zrpc.split([1, 2]), zrpc.each([1, 2, 3, 4])):
        with pytest.raises(ValueError, match=r"expected one share\(\)"):
            zrpc.rpc_sync(group, echo, (zrpc.share([1]), other))
    with pytest.raises(ValueError, match="found it in one by remote"):
        zrpc.remote(group, echo, (zrpc.share([1]),))
    with pytest.raises(ValueError, match="an empty group"):
        zrpc.rpc_sync(group[4:], echo, (zrpc.share([1]),))


class Worker:
    def get(self, item: int) -> int:
        return item

    def stream(self, item: int) -> Iterator[int]:
        yield item

    def wait(self, gate: Gate) -> None:
        gate.wait_inside()

    def wait_in_steps(self, gate: Gate) -> Iterator[None]:
        yield gate.wait_inside()


def test_actors_that_are_stopped_take_no_items_if_there_are_others(caller: Mesh) -> None:
    actors = zrpc.remote(zrpc.group("worker[123]"), zrpc.actor(Worker, concurrency=1))
    actors[0].stop()
    items = zrpc.share(range(20))
    assert actors.rpc_sync().get(items) == [*range(20)]
    assert sorted(actors.rpc_stream().stream(items)) == [(item, item) for item in range(20)]
    actors[1:].stop()
    for call in (actors.rpc_sync().get, lambda items: list(actors.rpc_stream().stream(items))):
        with pytest.raises(zrpc.GroupError, match="20 of 20 items failed") as caught:
            call(items)
        assert caught.value.executed is False


# -- members that come and go ----------------------------------------------------------------------


@pytest.mark.parametrize("streams", [False, True])
def test_a_member_that_fails_by_another_loss_gets_items(caller: Mesh, streams: bool) -> None:
    def work(item: int) -> int:
        return zrpc.rpc_sync("worker3", abs, (item,)) if item < 3 else item

    def work_in_steps(item: int) -> Iterator[int]:
        yield work(item)

    caller.agent(3).close()
    group, items, found = zrpc.group("worker[12]"), (zrpc.share(range(9)),), set[int]()

    def run() -> None:
        if streams:
            for _, item in zrpc.rpc_stream(group, work_in_steps, items):
                found.add(item)
        else:
            zrpc.rpc_sync(group, work, items)

    with pytest.raises(zrpc.GroupError) as caught:
        run()
    assert caught.value.errors.keys() == {0, 1, 2}
    assert (found or caught.value.results.keys()) == {3, 4, 5, 6, 7, 8}


@pytest.mark.system
def test_the_items_of_a_dead_member(caller: Mesh, gate: Gate) -> None:
    """The one that it has begun fails, and the others go to those that live."""

    def work(item: int) -> int:
        return gate.wait_inside(item) if item == 0 else item

    def errors_if_it_dies(worker: int, group: Any) -> dict[int, Any]:
        future = zrpc.rpc_async(group, work, (zrpc.share(range(6)),))
        gate.await_entry()
        caller.agent(worker).close()
        with pytest.raises(zrpc.GroupError) as caught:
            future.wait()
        errors: dict[int, Any] = caught.value.errors
        return {item: (type(error), error.executed) for item, error in errors.items()}

    assert errors_if_it_dies(1, zrpc.group("worker[12]")) == {0: (zrpc.WorkerDied, None)}
    not_begun = dict.fromkeys(range(1, 6), (zrpc.WorkerDied, False))  # as nobody is left
    assert errors_if_it_dies(2, zrpc.group("worker2")) == {0: (zrpc.WorkerDied, None), **not_begun}


@pytest.mark.system
@pytest.mark.parametrize("streams", [False, True])
def test_items_fail_if_a_member_dies_and_the_others_do_nothing(
    caller: Mesh, gate: Gate, streams: bool
) -> None:
    actors = zrpc.remote(zrpc.group("worker[12]"), zrpc.actor(Worker, concurrency=1))
    actors[0].stop()
    items = (zrpc.share([gate] * 6),)

    def run() -> None:
        if streams:
            list(actors.rpc_stream().wait_in_steps(*items))
        else:
            actors.rpc_sync().wait(*items)

    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(run)
        gate.await_entry()
        caller.agent(2).close()
        with pytest.raises(zrpc.GroupError) as caught:
            ended.result(SOON)
    errors = caught.value.errors.values()
    assert len(errors) == 6
    assert [each.executed for each in errors if isinstance(each, zrpc.OwnerDied)] == [None]


@pytest.mark.system
def test_a_worker_that_joins_takes_items(elastic: Elastic, gate: Gate) -> None:
    def work(item: int) -> str:
        return gate.wait_inside(name(item)) if item == 0 else name(item)

    first, _ = elastic.join_all(2)
    with first.as_current():
        group = zrpc.group("w[1-9]", live=True)
        future = zrpc.rpc_async(group, work, (zrpc.share(range(5)),))
        gate.await_entry()
        elastic.join("x4")  # of no group
        elastic.join("w4")
        assert [part.wait() for part in future.parts[1:]] == ["w4"] * 4
        gate.open()
        assert future.wait()[0] == "w1"

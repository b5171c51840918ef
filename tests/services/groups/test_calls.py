"""Calls of groups: who is called, with what, and what comes back."""

from __future__ import annotations

import dataclasses
import pickle
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import zrpc
from tests.services.groups.conftest import outcomes
from tests.support.gates import Gate
from tests.support.identity import Same
from tests.support.targets import echo
from tests.support.waiting import SOON, until
from zrpc import autograd
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=4, timeout=90, options={"rpc_timeout": 40})


def name() -> str:
    return zrpc.get_worker_info().name


def fail_at(*names: str) -> str:
    if name() in names:
        raise LookupError(name())
    return name()


class Counter:
    def __init__(self, start: int) -> None:
        self.count = start

    def add(self, number: int) -> int:
        self.count += number
        return self.count

    def __getitem__(self, key: Any) -> Any:
        return self.count, key


# -- the sequence ----------------------------------------------------------------------------------


def test_a_group_is_a_sequence(caller: Mesh) -> None:
    assert [*zrpc.group("*")] == caller.names  # the caller too
    assert [*zrpc.group("worker[12]")] == ["worker1", "worker2"]
    group = zrpc.group(["worker2", 0, zrpc.get_worker_info("worker1")])
    assert isinstance(group, Sequence)
    assert [*group] == ["worker2", "worker0", "worker1"]
    assert (len(group), group[-1], group.index("worker0")) == (3, "worker1", 1)
    assert "worker3" not in group
    assert zrpc.get_worker_info("worker2") in group
    info = zrpc.get_worker_info("worker0")
    assert (group.index(info), group.count(info)) == (1, 1)
    with pytest.raises(ValueError, match="not in"):
        group.index(info, 2)
    assert zrpc.rpc_sync(group[1:], name) == ["worker0", "worker1"]
    assert "worker2, worker0, worker1" in repr(group)
    assert zrpc.rpc_sync(zrpc.group(["worker1"] * 3), name) == ["worker1"] * 3


def test_an_empty_slice_calls_nobody(caller: Mesh) -> None:
    empty = zrpc.group("*")[4:]
    assert zrpc.rpc_sync(empty, name) == []
    assert len(zrpc.remote(empty, list)) == 0
    assert zrpc.rpc_sync(empty, echo, args=(zrpc.each([]),)) == []
    with pytest.raises(ValueError, match=r"expected each\(\) of 0 values"):
        zrpc.rpc_sync(empty, echo, args=(zrpc.each([1]),))
    with pytest.raises(ValueError, match="to split a value among, found an empty group"):
        zrpc.rpc_sync(empty, echo, args=(zrpc.split([1]),))


def test_members_that_can_not_be_are_refused(caller: Mesh) -> None:
    refused: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        ("no*", {}, zrpc.RpcError, r"names match 'no\*', found none; there are worker0"),
        ([], {}, ValueError, "expected members"),
        (["worker9"], {}, zrpc.RpcError, "could not find destination 'worker9'"),
        (["worker1", 1.5], {}, TypeError, "found one of type float"),
        (["worker1", zrpc.RRef(1)], {}, TypeError, "or RRefs and nothing else"),
        (0, {}, TypeError, r"but got 0: a group of one is group\(\[member\]\)"),
        (zrpc.get_worker_info("worker1"), {}, TypeError, "name=worker1.*: a group of one"),
        (zrpc.RRef(1), {}, TypeError, "but got .*RRef.*: a group of one"),
        (b"worker1", {}, TypeError, "but got b'worker1'"),
        (["worker1"], {"live": True}, ValueError, "expected a pattern"),
        ("*", {"size": 0}, ValueError, "expected a size of 1 or more"),
        ("*", {"size": 5, "timeout": 0.01}, zrpc.RpcTimeoutError, r"5 workers.*found 4: worker0"),
    ]
    for members, options, error, text in refused:
        with pytest.raises(error, match=text):
            zrpc.group(members, **options)


def test_a_group_can_be_sent(caller: Mesh) -> None:
    group = zrpc.group("worker[01]")
    assert zrpc.rpc_sync("worker3", zrpc.rpc_sync, args=(group, name)) == ["worker0", "worker1"]
    values = zrpc.remote(group, Counter, args=(zrpc.each([1, 2]),))
    assert zrpc.rpc_sync("worker3", lambda values: values.rpc_sync().add(1), (values,)) == [2, 3]


# -- what is called --------------------------------------------------------------------------------


def test_each_member_gets_its_arguments(caller: Mesh) -> None:
    args = (1, zrpc.split([1, 2, 3, 4, 5]), [zrpc.each("abcd")])
    found = zrpc.rpc_sync(zrpc.group("*"), echo, args, {"more": {"x": zrpc.split(torch.arange(4))}})
    assert [each[0] for each in found] == [
        (1, [1, 2], ["a"]),
        (1, [3], ["b"]),
        (1, [4], ["c"]),
        (1, [5], ["d"]),
    ]
    assert [each[1]["more"]["x"].item() for each in found] == [0, 1, 2, 3]
    assert zrpc.rpc_sync(zrpc.group("*"), len, (zrpc.split([7]),)) == [1, 0, 0, 0]


def test_closures_and_coroutines_are_called_on_all(caller: Mesh) -> None:
    base = torch.ones(1000) * 5

    async def later(number: int) -> float:
        return base.sum().item() + number

    for function in (lambda i: base.sum().item() + i, later):
        found = zrpc.rpc_sync(zrpc.group("*"), function, (zrpc.each(range(4)),))
        assert found == [5000.0, 5001.0, 5002.0, 5003.0]


def test_what_is_wrong_for_all_is_refused_before_anything_is_sent(caller: Mesh) -> None:
    group = zrpc.group("*")
    with pytest.raises(ValueError, match="each"):
        zrpc.rpc_sync(group, echo, args=(zrpc.split([1, 2]), {"deep": zrpc.each([1, 2, 3])}))
    with pytest.raises(TypeError, match="to split"):
        zrpc.rpc_async(group, echo, args=(zrpc.split(7),))
    with pytest.raises(ValueError, match="each"):
        zrpc.remote(group, echo, args=(zrpc.each([]),))
    with pytest.raises(zrpc.SerializationError):
        zrpc.rpc_sync(group, echo, args=(threading.Lock(),))
    assert not zrpc.stats().calls


def test_a_future_has_one_part_for_each_member(caller: Mesh, gate: Gate) -> None:
    future = zrpc.rpc_async(zrpc.group("worker[321]"), gate.wait_inside, (zrpc.each("abc"),))
    gate.await_entry(3)
    assert not future.done()
    gate.open()
    assert sorted(part.wait() for part in zrpc.as_completed(future.parts)) == ["a", "b", "c"]
    assert [part.wait() for part in future.parts] == future.wait() == ["a", "b", "c"]
    assert future.then(lambda done: len(done.wait())).wait() == 3

    async def call() -> Any:
        return await zrpc.rpc_async(zrpc.group("*")[::-1], name)

    assert zrpc.rpc_sync("worker3", call) == caller.names[::-1]


# -- references ------------------------------------------------------------------------------------


def test_a_group_of_references(caller: Mesh) -> None:
    values = zrpc.remote(zrpc.group("*"), Counter, args=(zrpc.each([1, 2, 3, 4]),))
    assert [value.owner_name() for value in values] == caller.names
    assert values.rpc_sync().add(10) == [11, 12, 13, 14]
    assert values[2:].rpc_async().add(zrpc.each([1, 2])).wait() == [14, 16]
    assert values.rpc_sync().__getitem__("k") == [(11, "k"), (12, "k"), (14, "k"), (16, "k")]
    assert values.index(values[3]) == 3
    assert [*zrpc.group([values[3], values[0]]).rpc_sync().add(0)] == [16, 11]
    made = values.remote().add(zrpc.each([1, 2, 3, 4]))
    assert [value.to_here() for value in made] == [12, 14, 17, 20]
    with pytest.raises(zrpc.GroupError, match="has no attribute 'missing'") as caught:
        values.remote().missing()
    assert {type(error) for error in caught.value.errors.values()} == {AttributeError}


def test_references_in_the_arguments_count_for_each_member(caller: Mesh) -> None:
    shared = zrpc.remote("worker1", Counter, args=(1,))
    group = zrpc.group("*")

    def use(rref: Any, own: Any, both: list[Any]) -> Any:
        return rref.rpc_sync().add(1), own.rpc_sync().add(0), len(both)

    own = zrpc.remote(group, Counter, args=(zrpc.each([5, 6, 7, 8]),))
    found = zrpc.rpc_sync(group, use, (shared, zrpc.each(own), [shared, shared]))
    assert sorted(each[0] for each in found) == [2, 3, 4, 5]
    assert [each[1:] for each in found] == [(5, 2), (6, 2), (7, 2), (8, 2)]
    del shared, own
    for worker in caller.names:
        until(lambda worker=worker: zrpc.rpc_sync(worker, zrpc.stats).rrefs_owned == 0)


@zrpc.actor
class Log:
    def __init__(self) -> None:
        self.seen: list[int] = []

    def add(self, number: int) -> list[int]:
        self.seen.append(number)
        return self.seen


def test_calls_of_groups_slices_and_members_of_actors_have_one_order(caller: Mesh) -> None:
    logs, numbers = zrpc.remote(zrpc.group("worker[123]"), Log), range(60)
    futures = [(logs, logs[1:], logs[2])[n % 3].rpc_async().add(n) for n in numbers]
    assert logs.rpc_sync().add(60) == [
        [n for n in numbers if n % 3 == 0] + [60],
        [n for n in numbers if n % 3 < 2] + [60],
        [*numbers, 60],
    ]
    zrpc.wait_all(futures)


# -- failures --------------------------------------------------------------------------------------


def test_some_members_fail(caller: Mesh) -> None:
    future = zrpc.rpc_async(zrpc.group("*"), fail_at, args=("worker1", "worker3"))
    for _ in range(2):  # each wait raises an error of its own
        with pytest.raises(zrpc.GroupError) as caught:
            future.wait()
    error = caught.value
    assert sorted(error.errors) == [1, 3]
    assert isinstance(error.errors[1], LookupError)
    assert isinstance(error.errors[1].__cause__, zrpc.RemoteError)
    assert error.results == {0: "worker0", 2: "worker2"}
    assert error.executed is None
    assert "2 of 4 members" in str(error)
    assert "worker3: LookupError: worker3" in str(error)
    assert isinstance(error, zrpc.RpcError)
    assert isinstance(error, ExceptionGroup)
    with pytest.raises(LookupError):
        future.parts[3].wait()


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


class Textless(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize("error", [Frozen(7), Textless()], ids=["frozen", "textless"])
def test_members_may_raise_errors_without_attributes_or_text(
    caller: Mesh, error: Exception
) -> None:
    def fail() -> None:
        raise error

    assert outcomes(zrpc.rpc_sync, zrpc.group("*"), fail, timeout=SOON) == [type(error)] * 4


def test_parts_of_an_error_are_errors_of_groups(caller: Mesh) -> None:
    def fail(kind: type[Exception]) -> None:
        raise kind("this")

    found: list[Any] = []
    try:
        zrpc.rpc_sync(zrpc.group("*"), fail, (zrpc.each([KeyError, OSError, OSError, ValueError]),))
    except* OSError as group:
        found.append(group)
    except* (KeyError, ValueError) as group:
        found.append(group)
    assert [type(each) for each in found] == [zrpc.GroupError] * 2
    assert [sorted(each.errors) for each in found] == [[1, 2], [0, 3]]


def test_the_error_of_a_group_can_be_sent_and_pickled(caller: Mesh) -> None:
    with pytest.raises(zrpc.GroupError) as caught:
        zrpc.rpc_sync("worker1", lambda: zrpc.rpc_sync(zrpc.group("*"), fail_at, ("worker2",)))
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert [*error.errors] == [2]
        assert error.errors[2] is error.exceptions[0]
        assert error.results == {0: "worker0", 1: "worker1", 3: "worker3"}


class Explains(Exception):
    def __init__(self, rref: Any) -> None:
        super().__init__("it has an RRef", rref)
        self.rref = rref


def make_or_fail(place: int) -> Any:
    rref = zrpc.RRef(place)
    if place == 1:
        raise Explains(rref)
    return rref


def call_two() -> None:
    zrpc.rpc_sync(zrpc.group(["worker1", "worker2"]), make_or_fail, args=(zrpc.each([0, 1]),))


def test_an_error_with_references_that_a_handler_raises_keeps_its_type(caller: Mesh) -> None:
    with pytest.raises(zrpc.GroupError) as caught:
        zrpc.rpc_sync("worker3", call_two)
    (error,) = caught.value.exceptions
    assert isinstance(error, Explains)
    assert "left out: RRef(int on worker2)" in str(error)
    assert "left out: RRef(int on worker2)" in error.rref
    assert [*caught.value.results] == [0]
    assert "left out: RRef(value on worker1)" in caught.value.results[0]


def test_what_can_not_be_pickled_for_one_fails_for_it(caller: Mesh) -> None:
    args = (zrpc.each([1, threading.Lock(), 3, 4]),)
    found = outcomes(zrpc.rpc_sync, zrpc.group("*"), echo, args)
    assert found == [1, zrpc.SerializationError, 3, 4]
    with pytest.raises(zrpc.GroupError, match="found one of type lock") as caught:
        zrpc.remote(zrpc.group("*"), echo, args)
    assert [*caught.value.errors] == [1]
    assert caught.value.results[3].to_here() == 4


def test_a_deadline_holds_for_the_whole(caller: Mesh, gate: Gate) -> None:
    args = (zrpc.each([gate.wait_inside, abs, gate.wait_inside, abs]), 7)
    found = outcomes(zrpc.rpc_sync, zrpc.group("*"), lambda f, x: f(x), args, timeout=0.5)
    assert found == [zrpc.RpcTimeoutError, 7, zrpc.RpcTimeoutError, 7]


def test_cancelling_a_future_cancels_all(caller: Mesh) -> None:
    stopped, begun = threading.Semaphore(0), threading.Semaphore(0)

    class Rest(Same):
        def __call__(self) -> None:
            begun.release()
            if zrpc.current_call().wait_cancelled(SOON):
                stopped.release()

    future = zrpc.rpc_async(zrpc.group("worker[12]"), Rest())
    assert all(begun.acquire(timeout=SOON) for _ in range(2))
    assert [future.cancel(), future.cancelled(), future.cancel()] == [True, True, False]
    with pytest.raises(zrpc.RpcCancelledError):
        future.wait()
    assert all(stopped.acquire(timeout=SOON) for _ in range(2))
    assert all(part.cancelled() for part in future.parts)


def test_cancelling_a_part_leaves_the_others(caller: Mesh, gate: Gate) -> None:
    future = zrpc.rpc_async(zrpc.group("worker[123]"), gate.wait_inside, (zrpc.each("abc"),))
    gate.await_entry(3)
    assert future.parts[1].cancel()
    gate.open()
    assert outcomes(future.wait) == ["a", zrpc.RpcCancelledError, "c"]


@pytest.mark.zrpc(options={"max_bytes_in_flight": 1 << 16})
def test_a_member_that_is_full_does_not_hold_up_the_others(caller: Mesh, gate: Gate) -> None:
    filling = zrpc.rpc_async("worker1", gate.wait_inside, (bytes(1 << 16),))
    gate.await_entry()
    found = outcomes(zrpc.rpc_sync, zrpc.group("*"), name, timeout=1.0)
    assert found == ["worker0", zrpc.RpcTimeoutError, "worker2", "worker3"]
    gate.open()
    filling.wait()


@zrpc.actor
class Leaver:
    def leave(self) -> None:
        zrpc.shutdown(graceful=False)


def test_the_errors_of_dead_members_name_the_class_and_nothing_else(caller: Mesh) -> None:
    leavers = zrpc.remote(zrpc.group(["worker1", "worker2"]), Leaver)
    with pytest.raises(zrpc.GroupError) as caught:
        leavers.rpc_sync().leave()
    for place, each in caught.value.errors.items():
        assert isinstance(each, zrpc.OwnerDied)
        assert f"the actor Leaver on worker{place + 1} is lost" in str(each)
    assert "During handling" not in "".join(traceback.format_exception(caught.value))


class Scale:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def apply(self, tensor: torch.Tensor, constant: float = 0) -> torch.Tensor:
        return tensor * self.factor + constant


def test_gradients_flow_through_calls_of_groups(caller: Mesh) -> None:
    group, other = zrpc.group("*"), torch.ones(4, requires_grad=True)
    values = zrpc.remote(group, Scale, (zrpc.each([1.0, 2.0, 3.0, 4.0]),))
    calls: list[tuple[Callable[[torch.Tensor], Any], list[float]]] = [
        (lambda x: zrpc.rpc_sync(group, torch.mul, (x, zrpc.each([1, 2, 3, 4]))), [10.0] * 4),
        (lambda x: values.rpc_async().apply(x, constant=torch.ones(4)).wait(), [10.0] * 4),
        (lambda x: zrpc.rpc_sync(group, torch.square, (zrpc.split(x),)), [0.0, 2.0, 4.0, 6.0]),
        # A value that several members get.
        (
            lambda x: zrpc.rpc_sync(group, torch.neg, (zrpc.each([x, other, x, other]),)),
            [-2.0] * 4,
        ),
    ]
    for call, expected in calls:
        weight = torch.arange(4.0, requires_grad=True)
        with autograd.context() as context:
            autograd.backward(context, [torch.cat(call(weight)).sum()])
            assert autograd.get_gradients(context)[weight].tolist() == expected


def test_outside_of_a_context_leaves_arrive(caller: Mesh) -> None:
    weight = torch.ones(2, requires_grad=True)
    found = zrpc.rpc_sync(zrpc.group("*"), lambda t: (t.is_leaf, t.requires_grad), (weight,))
    assert found == [(True, True)] * 4

"""What an RRef is and tells, and how its value is had: here, at the owner, or an error instead."""

from __future__ import annotations

import copy
import io
import pickle
import re
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cloudpickle
import pytest
import torch

import zrpc
from tests.services.rref.tracked import (
    Value,
    give,
    has_timed_out,
    is_freed,
    make_late,
)
from tests.support.gates import Gate
from tests.support.identity import event
from tests.support.waiting import SOON, pending, until
from zrpc.testing import Mesh
from zrpc.testing.plugin import MakeMesh


def test_an_owner_and_a_user_know_the_owner(caller: Mesh) -> None:
    value = ["a", object()]
    own = zrpc.RRef(value)
    assert own.owner() == zrpc.get_worker_info() == zrpc.WorkerInfo("worker0", 0)
    assert (own.is_owner(), own.confirmed_by_owner(), own.owner_name()) == (True, True, "worker0")
    assert own.local_value() is own.to_here() is own.to_here(timeout=1) is value
    user = zrpc.remote("worker1", torch.add, args=(torch.ones(2), 1))
    assert user.owner() == zrpc.WorkerInfo("worker1", 1)
    assert (user.is_owner(), user.owner_name()) == (False, "worker1")
    assert user.to_here().tolist() == [2, 2]
    until(user.confirmed_by_owner, "confirmed")
    with pytest.raises(AttributeError):
        own.value = 3


def test_ids_are_counted_as_torch_counts_them(caller: Mesh) -> None:
    """A call of `remote` takes two."""
    rrefs = [zrpc.RRef(1), *(zrpc.remote(to, max, (1, 2)) for to in (0, 1)), zrpc.RRef(0)]
    owned = "OwnerRRef(GloballyUniqueId(created_on=0, local_id={}))"
    user = (
        "UserRRef(RRefId = GloballyUniqueId(created_on=0, local_id=3), "
        "ForkId = GloballyUniqueId(created_on=0, local_id=4))"
    )
    assert [*map(str, rrefs)] == [owned.format(0), owned.format(1), user, owned.format(5)]
    assert rrefs[1].to_here() == rrefs[1].local_value() == 2


def test_rrefs_to_one_value_are_equal(caller: Mesh) -> None:
    rref, other = zrpc.RRef([1]), zrpc.RRef([1])
    again = zrpc.rpc_sync("worker1", give, args=(rref,))
    assert again is not rref
    assert again == rref
    assert rref not in (other, "something else")
    assert {rref, again, other} == {again, other}
    assert {rref: "found"}[again] == "found"


def test_rrefs_cannot_be_pickled_outside_of_rpc(caller: Mesh) -> None:
    ways: list[Any] = [
        pickle.dumps,
        lambda rref: pickle.dumps({"a": [rref]}, 2),
        copy.copy,
        copy.deepcopy,
        cloudpickle.dumps,
        lambda rref: torch.save({"a": rref}, io.BytesIO()),
    ]
    for rref in (zrpc.RRef(5), zrpc.remote("worker1", max, args=(1, 5))):
        for way in ways:
            with pytest.raises(
                RuntimeError, match="Can not pickle rref in python pickler, rref can"
            ):
                way(rref)
        assert rref.to_here() == 5


class Subclass(zrpc.RRef[int]):
    def doubled(self) -> int:
        return 2 * self.to_here()


def test_a_subclass_can_be_sent(caller: Mesh) -> None:
    rref = Subclass(4)
    assert zrpc.rpc_sync("worker1", zrpc.RRef.to_here, args=(rref,)) == 4


def test_an_rref_after_the_shutdown_says_what_is_wrong(make_mesh: MakeMesh) -> None:
    mesh = make_mesh()
    own = mesh.run(0, zrpc.RRef, [1])
    user = mesh.run(0, zrpc.remote, "worker1", list)
    mesh.run(0, user.to_here)
    mesh.shutdown()
    for use in (
        lambda: user.rpc_sync().append(1),
        lambda: user.rpc_async().append(1),
        lambda: user.remote().copy(),
        lambda: own.rpc_sync().append(1),
    ):
        with pytest.raises(zrpc.NotInitializedError, match="RPC has not been initialized"):
            use()
    with pytest.raises(zrpc.NotInitializedError, match=r"Cannot call to_here\(\) on it after"):
        user.to_here()
    with pytest.raises(zrpc.NotInitializedError, match="Cannot call fork an UserRRef after"):
        user._serialize()
    assert own.to_here() == [1]
    assert "GloballyUniqueId" in str(user)
    assert repr(user) == "RRef(list on worker1)"
    assert user.owner_name() == "worker1"


@pytest.mark.zrpc(workers=3)
def test_rrefs_that_are_held_do_not_hold_up_the_shutdown(make_mesh: MakeMesh) -> None:
    mesh = make_mesh()
    held = [
        mesh.run(0, zrpc.RRef, Value("own")),
        mesh.run(0, zrpc.remote, "worker1", Value, args=("user",)),
        mesh.run(2, zrpc.remote, "worker2", Value, args=("self",)),
        mesh.run(2, zrpc.rpc_sync, "worker1", zrpc.RRef, args=(5,)),
    ]
    mesh.shutdown()
    assert is_freed("user")
    held.clear()
    assert is_freed("own")
    assert is_freed("self")


def wait_for(name: Any) -> Any:
    assert event(name).wait(SOON)
    return name


def fail(error: Any) -> None:
    raise error


@pytest.mark.zrpc(options={"rpc_timeout": 0.05})
def test_to_here_waits_for_the_value_until_its_timeout_or_the_default(caller: Mesh) -> None:
    for to in ("worker0", "worker1"):
        rref = zrpc.remote(to, wait_for, args=(to,), timeout=0)
        for timeout in ((), (0.05,)):
            with pytest.raises(zrpc.RpcTimeoutError, match=re.escape("timeout (50 ms)")):
                rref.to_here(*timeout)
        future = caller.submit(0, rref.to_here, 0)
        assert pending(future, 0.1)
        event(to).set()
        assert future.result(SOON) == to


def append_here(rref: Any) -> Any:
    assert rref.is_owner()
    assert rref.local_value() is rref.to_here()
    rref.local_value().append("changed")
    return id(rref.local_value())


def test_local_value_is_the_very_object_and_to_here_a_copy(caller: Mesh) -> None:
    argument = ["own"]
    rref = zrpc.remote("worker1", list, args=(argument,))
    argument.append("later")
    with pytest.raises(
        RuntimeError,
        match=re.escape("can't call localValue() on user WorkerInfo(id=0, name=worker0). ")
        + re.escape("Call it on owner WorkerInfo(id=1, name=worker1)"),
    ):
        rref.local_value()
    rref.to_here().append("of the copy")
    first = zrpc.rpc_sync("worker1", append_here, args=(rref,))
    assert zrpc.rpc_sync("worker1", append_here, args=(rref,)) == first
    assert rref.to_here() == ["own", "changed", "changed"]


# -- errors ------------------------------------------------------------------------------------


class Unusual(Exception):
    """Its args are not those of its constructor."""

    def __init__(self, a: Any, b: Any) -> None:
        super().__init__(f"{a} and {b}")


class Precise(ValueError):
    pass


def test_an_error_has_its_own_type_and_args_each_time(caller: Mesh) -> None:
    errors = ValueError("no", 1), KeyError("key"), Precise("exact"), zrpc.RpcError("own")
    for to in ("worker0", "worker1"):
        for error in errors:
            rref = zrpc.remote(to, fail, args=(error,))
            for use in (rref.to_here, rref.to_here, lambda rref=rref: rref.rpc_sync().anything()):
                with pytest.raises(type(error)) as caught:
                    use()
                assert type(caught.value) is type(error)
                assert caught.value.args == error.args
            text = "".join(traceback.format_exception(caught.value))
            assert f"On WorkerInfo(id={to[-1]}, name={to})" in text
            assert "in fail" in text


def test_an_error_of_an_own_call_is_the_one_that_was_raised(caller: Mesh) -> None:
    rref = zrpc.remote("worker0", lambda: fail(Unusual(1, 2)))
    for use in (rref.to_here, rref.local_value):
        with pytest.raises(Unusual, match="1 and 2"):
            use()


@pytest.mark.parametrize("to", ["worker0", "worker1"])
def test_a_call_that_timed_out_shows_at_each_use_and_its_value_is_freed(
    mesh: Mesh, to: str
) -> None:
    def at_user() -> None:
        rref = zrpc.remote(to, make_late, args=("late", "go"), timeout=0.05)
        until(lambda: has_timed_out(rref), "the call has timed out")
        for use in (
            rref.to_here,
            lambda: rref.rpc_sync().get_key(),
            lambda: rref.remote().get_key(),
            lambda: rref.rpc_async().get_key().wait(),
        ):
            with pytest.raises(zrpc.RpcTimeoutError, match=r"RRef creation via rpc\.remote\(\)"):
                use()

    mesh.run(0, at_user)
    event("go").set()
    assert is_freed("late")


@pytest.mark.system
@pytest.mark.zrpc(workers=1)
def test_a_shutdown_ends_the_wait_for_an_own_value(mesh: Mesh) -> None:
    with ThreadPoolExecutor(1) as other, Gate() as gate, mesh.agent(0).as_current():
        rref = zrpc.remote("worker0", gate.wait_inside)
        gate.await_entry()
        waits = other.submit(rref.local_value)
        assert pending(waits, 0.1)
        mesh.agent(0).shutdown(graceful=False)
        with pytest.raises(zrpc.NotInitializedError, match="this worker has shut down"):
            waits.result(SOON)

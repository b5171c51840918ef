"""What an RRef is and tells."""

from __future__ import annotations

import copy
import io
import pickle
import re
from typing import Any, get_type_hints

import cloudpickle
import pytest
import torch

import zrpc
from tests.services.rref.tracked import (
    SOON,
    Value,
    is_freed,
)
from tests.support.identity import event
from tests.support.waiting import until
from zrpc.testing import Mesh
from zrpc.testing.plugin import MakeMesh

CANNOT_PICKLE = "Can not pickle rref in python pickler, rref can only be pickled when using RPC"


def wait_and_return(name: Any, value: Any) -> Any:
    assert event(name).wait(SOON)
    return value


def test_an_owner_knows_its_value(caller: Mesh) -> None:
    value = ["a", object()]
    rref = zrpc.RRef(value)
    assert rref.is_owner()
    assert rref.confirmed_by_owner()
    assert rref.owner() == zrpc.get_worker_info() == zrpc.WorkerInfo("worker0", 0)
    assert rref.owner_name() == "worker0"
    assert rref.local_value() is value
    assert rref.to_here() is value
    assert rref.to_here(timeout=1) is value


def test_a_user_knows_its_owner(caller: Mesh) -> None:
    rref = zrpc.remote("worker1", torch.add, args=(torch.ones(2), 1))
    assert isinstance(rref, zrpc.RRef)
    assert not rref.is_owner()
    assert rref.owner() == zrpc.WorkerInfo("worker1", 1)
    assert rref.owner_name() == "worker1"
    assert rref.to_here().tolist() == [2, 2]
    until(rref.confirmed_by_owner, "confirmed")


def test_remote_returns_before_there_is_a_value(caller: Mesh) -> None:
    rref = zrpc.remote("worker1", wait_and_return, args=("later", 5))
    assert not rref.confirmed_by_owner()  # that is told with the value
    event("later").set()
    assert rref.to_here() == 5
    until(rref.confirmed_by_owner, "confirmed")


@pytest.mark.parametrize("to", ["worker1", 1, zrpc.WorkerInfo("worker1", 1)])
def test_remote_takes_names_ranks_and_worker_infos(mesh: Mesh, to: Any) -> None:
    assert mesh.run(0, lambda: zrpc.remote(to, dict, kwargs={"a": 1}).to_here()) == {"a": 1}


def test_remote_checks_its_arguments(mesh: Mesh) -> None:
    with pytest.raises(TypeError, match=re.escape("function should be callable.")):
        mesh.run(0, zrpc.remote, "worker1", 5)
    with pytest.raises(RuntimeError, match="could not find destination"):
        mesh.run(0, zrpc.remote, "worker7", max)
    with pytest.raises(ValueError, match="WorkerInfo"):
        mesh.run(0, zrpc.remote, 0.5, max)
    with pytest.raises(ValueError, match="timeout"):
        mesh.run(0, zrpc.remote, 1, max, args=(1, 2), timeout=float("nan"))


def test_there_are_no_rrefs_without_an_agent() -> None:
    with pytest.raises(RuntimeError, match="Current RPC agent is not set! Did you initialize"):
        zrpc.RRef(1)
    with pytest.raises(RuntimeError, match=r"^RPC has not been initialized"):
        zrpc.remote("worker0", max, args=(1, 2))


def test_ids_are_counted_as_torch_counts_them(mesh: Mesh) -> None:
    def reprs() -> Any:
        first, second = zrpc.RRef(1), zrpc.RRef(2)
        third = zrpc.remote("worker1", max, args=(1, 2))
        fourth = zrpc.RRef(4)
        return [repr(rref) for rref in (first, second, third, fourth)]

    assert mesh.run(0, reprs) == [
        "OwnerRRef(GloballyUniqueId(created_on=0, local_id=0))",
        "OwnerRRef(GloballyUniqueId(created_on=0, local_id=1))",
        "UserRRef(RRefId = GloballyUniqueId(created_on=0, local_id=2), "
        "ForkId = GloballyUniqueId(created_on=0, local_id=3))",
        "OwnerRRef(GloballyUniqueId(created_on=0, local_id=4))",
    ]
    assert mesh.run(1, lambda: repr(zrpc.RRef(1))) == (
        "OwnerRRef(GloballyUniqueId(created_on=1, local_id=0))"
    )


def test_remote_to_oneself_takes_two_ids_and_owns_the_value(caller: Mesh) -> None:
    rref = zrpc.remote("worker0", max, args=(1, 2))
    assert rref.is_owner()
    assert rref.to_here() == rref.local_value() == 2
    assert repr(rref) == "OwnerRRef(GloballyUniqueId(created_on=0, local_id=0))"
    assert repr(zrpc.RRef(0)) == "OwnerRRef(GloballyUniqueId(created_on=0, local_id=2))"


def give_back(rref: Any) -> Any:
    return rref


def test_rrefs_to_one_value_are_equal(caller: Mesh) -> None:
    rref, other = zrpc.RRef([1]), zrpc.RRef([1])
    again = zrpc.rpc_sync("worker1", give_back, args=(rref,))
    assert again is not rref
    assert again == rref
    assert hash(again) == hash(rref)
    assert rref != other
    assert {rref, again, other} == {again, other}
    assert {rref: "found"}[again] == "found"
    assert rref != "something else"


def test_a_users_copies_are_equal(caller: Mesh) -> None:
    rref = zrpc.remote("worker1", list)
    again = zrpc.rpc_sync("worker0", give_back, args=(rref,))
    assert again == rref
    assert len({rref, again}) == 1
    assert repr(again) != repr(rref)  # another fork


@pytest.mark.parametrize("at", ["owner", "user"])
@pytest.mark.parametrize(
    "copied",
    [
        pickle.dumps,
        lambda rref: pickle.dumps(rref, 2),
        lambda rref: pickle.dumps({"a": [rref]}),
        copy.copy,
        copy.deepcopy,
        cloudpickle.dumps,
        lambda rref: torch.save(rref, io.BytesIO()),
        lambda rref: torch.save({"a": rref}, io.BytesIO()),
    ],
)
def test_rrefs_cannot_be_pickled_outside_of_rpc(caller: Mesh, at: str, copied: Any) -> None:
    rref = zrpc.RRef(5) if at == "owner" else zrpc.remote("worker1", max, args=(1, 2))
    with pytest.raises(RuntimeError, match=CANNOT_PICKLE):
        copied(rref)
    assert rref.to_here() in (2, 5)


def test_an_rref_of_another_worker_can_not_be_sent(mesh: Mesh) -> None:
    rref = mesh.run(1, zrpc.RRef, 5)
    with pytest.raises(RuntimeError, match=CANNOT_PICKLE):
        mesh.run(0, zrpc.rpc_sync, "worker1", give_back, args=(rref,))


def test_type_hints_and_bases() -> None:
    def function(rref: zrpc.RRef[torch.Tensor]) -> zrpc.RRef[int]: ...

    assert get_type_hints(function)["return"] == zrpc.RRef[int]


class Subclass(zrpc.RRef[int]):
    def doubled(self) -> int:
        return 2 * self.to_here()


def test_a_subclass_can_be_sent(caller: Mesh) -> None:
    rref = Subclass(4)
    assert zrpc.rpc_sync("worker1", zrpc.RRef.to_here, args=(rref,)) == 4


@pytest.mark.system
def test_an_rref_of_an_rref(mesh: Mesh) -> None:
    def at_user() -> None:
        inner = zrpc.remote("worker1", Value, args=("inner",))
        outer = zrpc.remote("worker1", zrpc.RRef, args=(inner,))
        del inner
        assert outer.to_here().to_here().rpc_sync().get_key() == "inner"

    mesh.run(0, at_user)
    assert is_freed("inner")


def test_attributes_can_not_be_added_by_mistake(caller: Mesh) -> None:
    with pytest.raises(AttributeError):
        zrpc.RRef(1).value = 3


# -- after the end ---------------------------------------------------------------------------


def test_an_rref_after_the_shutdown_says_what_is_wrong(make_mesh: MakeMesh) -> None:
    mesh = make_mesh()
    own = mesh.run(0, zrpc.RRef, [1])
    user = mesh.run(0, zrpc.remote, "worker1", list)
    mesh.run(0, user.to_here)
    mesh.shutdown()
    for use in (
        user.to_here,
        lambda: user.rpc_sync().append(1),
        lambda: user.rpc_async().append(1),
        lambda: user.remote().copy(),
        lambda: own.rpc_sync().append(1),
    ):
        with pytest.raises(zrpc.NotInitializedError, match="RPC has not been initialized"):
            use()
    assert "GloballyUniqueId" in repr(user)
    assert user.owner_name() == "worker1"


@pytest.mark.zrpc(workers=3)
def test_rrefs_that_are_held_do_not_hold_up_the_shutdown(make_mesh: MakeMesh) -> None:
    mesh = make_mesh()
    held = [
        mesh.run(0, zrpc.RRef, Value("own")),
        mesh.run(0, zrpc.remote, "worker1", Value, args=("user",)),
        mesh.run(2, zrpc.remote, "worker2", Value, args=("self",)),
    ]
    held.append(mesh.run(2, zrpc.rpc_sync, "worker1", zrpc.RRef, args=(5,)))
    mesh.shutdown()
    assert is_freed("user")
    held.clear()
    assert is_freed("own")
    assert is_freed("self")


def test_an_rref_that_was_never_filled_can_end() -> None:
    rref = zrpc.RRef.__new__(zrpc.RRef)
    del rref

"""What an RRef is and tells, and how its value is had: here, at the owner, or an error instead."""

from __future__ import annotations

import copy
import io
import pickle
import re
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_type_hints

import cloudpickle
import pytest
import torch

import zrpc
from tests.services.rref.tracked import SOON, Value, entries, is_freed, layers, make_late
from tests.support.gates import Gate
from tests.support.identity import event
from tests.support.waiting import until
from zrpc.services.rref.messages import pack_id
from zrpc.testing import Mesh
from zrpc.testing.plugin import MakeMesh
from zrpc.wire.kind import Kind, Tag

CANNOT_PICKLE = "Can not pickle rref in python pickler, rref can only be pickled when using RPC"


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
        return [str(rref) for rref in (first, second, third, fourth)]

    assert mesh.run(0, reprs) == [
        "OwnerRRef(GloballyUniqueId(created_on=0, local_id=0))",
        "OwnerRRef(GloballyUniqueId(created_on=0, local_id=1))",
        "UserRRef(RRefId = GloballyUniqueId(created_on=0, local_id=2), "
        "ForkId = GloballyUniqueId(created_on=0, local_id=3))",
        "OwnerRRef(GloballyUniqueId(created_on=0, local_id=4))",
    ]
    assert mesh.run(1, lambda: str(zrpc.RRef(1))) == (
        "OwnerRRef(GloballyUniqueId(created_on=1, local_id=0))"
    )


def test_remote_to_oneself_takes_two_ids_and_owns_the_value(caller: Mesh) -> None:
    rref = zrpc.remote("worker0", max, args=(1, 2))
    assert rref.is_owner()
    assert rref.to_here() == rref.local_value() == 2
    assert str(rref) == "OwnerRRef(GloballyUniqueId(created_on=0, local_id=0))"
    assert str(zrpc.RRef(0)) == "OwnerRRef(GloballyUniqueId(created_on=0, local_id=2))"


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


def wait_for(name: Any) -> Any:
    assert event(name).wait(SOON)
    return name


def fail(error: Any) -> None:
    raise error


class Unusual(Exception):
    """Its args are not those of its constructor."""

    def __init__(self, a: Any, b: Any) -> None:
        super().__init__(f"{a} and {b}")
        self.a = a


class Precise(ValueError):
    pass


def fail_unusually() -> None:
    raise Unusual(1, 2)


def test_to_here_gives_a_copy_each_time(caller: Mesh) -> None:
    rref = zrpc.remote("worker1", list, args=((1, 2),))
    first, second = rref.to_here(), rref.to_here()
    assert first == second == [1, 2]
    first.append(3)
    assert rref.to_here() == [1, 2]
    assert second == [1, 2]


def test_to_here_waits_for_the_value(caller: Mesh) -> None:
    rref = zrpc.remote("worker1", wait_for, args=("go",))
    future = caller.submit(1, event("go").set)
    assert rref.to_here() == "go"
    future.result(SOON)


@pytest.mark.zrpc(options={"rpc_timeout": 0.05})
def test_to_here_takes_the_default_timeout(caller: Mesh) -> None:
    rref = zrpc.remote("worker1", wait_for, args=("go",), timeout=0)
    with pytest.raises(zrpc.RpcTimeoutError, match=re.escape("timeout (50 ms)")):
        rref.to_here()
    event("go").set()
    assert rref.to_here(timeout=0) == "go"


def test_to_here_of_an_own_value_times_out_too(caller: Mesh) -> None:
    rref = zrpc.remote("worker0", wait_for, args=("go",))
    with pytest.raises(zrpc.RpcTimeoutError, match=re.escape("timeout (50 ms)")):
        rref.to_here(timeout=0.05)
    event("go").set()
    assert rref.to_here() == rref.local_value() == "go"


@pytest.mark.parametrize("timeout", [float("nan"), float("inf")])
def test_a_timeout_must_be_a_number(mesh: Mesh, timeout: Any) -> None:
    rref = mesh.run(0, zrpc.remote, "worker1", list)
    with pytest.raises(ValueError, match="timeout"):
        mesh.run(0, rref.to_here, timeout)


def test_a_value_that_is_gone_is_not_waited_for(mesh: Mesh) -> None:
    # Who has such an RRef got it from a worker that has died since.
    def at_user() -> None:
        [layer, _] = layers(mesh)
        with pytest.raises(zrpc.RpcError, match="no longer here"):
            layer.agent.caller.call(
                zrpc.get_worker_info("worker1"),
                Kind.FETCH,
                None,
                SOON,
                extension=(Tag.SUBJECT, pack_id(1, 999)),
            )

    mesh.run(0, at_user)
    assert entries(layers(mesh)[1]) == 0


def test_local_value_is_for_the_owner(caller: Mesh) -> None:
    rref = zrpc.remote("worker1", list)
    with pytest.raises(
        RuntimeError,
        match=re.escape("can't call localValue() on user WorkerInfo(id=0, name=worker0). ")
        + re.escape("Call it on owner WorkerInfo(id=1, name=worker1)"),
    ):
        rref.local_value()


def local_identity(rref: Any) -> Any:
    assert rref.is_owner()
    assert rref.local_value() is rref.to_here()
    rref.local_value().append("changed")
    return id(rref.local_value())


def test_local_value_is_the_very_object(caller: Mesh) -> None:
    rref = zrpc.remote("worker1", list)
    first = zrpc.rpc_sync("worker1", local_identity, args=(rref,))
    assert zrpc.rpc_sync("worker1", local_identity, args=(rref,)) == first
    assert rref.to_here() == ["changed", "changed"]


@pytest.mark.system
@pytest.mark.parametrize("to", ["worker0", "worker1"])
@pytest.mark.parametrize(
    "error",
    [ValueError("no", 1), KeyError("key"), Precise("exact"), zrpc.RpcError("own"), IndexError()],
)
def test_an_error_has_its_own_type_and_args_each_time(caller: Mesh, to: str, error: Any) -> None:
    rref = zrpc.remote(to, fail, args=(error,))
    for _ in range(3):
        with pytest.raises(type(error)) as caught:
            rref.to_here()
        assert type(caught.value) is type(error)
        assert caught.value.args == error.args
    with pytest.raises(type(error)):
        rref.rpc_sync().anything()


def test_an_error_shows_where_it_was_raised(caller: Mesh) -> None:
    rref = zrpc.remote("worker1", fail, args=(ValueError("no"),))
    with pytest.raises(ValueError, match="no") as caught:
        rref.to_here()
    text = "".join(traceback.format_exception(caught.value))
    assert "On WorkerInfo(id=1, name=worker1)" in text
    assert "in fail" in text


def test_an_error_of_an_own_call_is_the_one_that_was_raised(caller: Mesh) -> None:
    rref = zrpc.remote("worker0", fail_unusually)
    with pytest.raises(Unusual, match="1 and 2"):
        rref.to_here()
    with pytest.raises(Unusual, match="1 and 2"):
        rref.local_value()


def test_an_error_is_written_to_the_owners_log(
    mesh: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    def at_user() -> None:
        with pytest.raises(KeyError):
            zrpc.remote("worker1", fail, args=(KeyError("told"),)).to_here()

    mesh.run(0, at_user)
    assert "KeyError: 'told'" in caplog.text
    assert "worker1" in caplog.text


def test_an_error_keeps_no_arguments_alive(mesh: Mesh) -> None:
    # The traceback refers to the frames of the function, and those to their variables.
    def at_user() -> Any:
        return zrpc.remote("worker1", fail_with_a_value)

    rref = mesh.run(0, at_user)
    with pytest.raises(ValueError, match="inside"):
        mesh.run(0, rref.to_here)
    assert is_freed("inside")


def fail_with_a_value() -> None:
    value = Value("inside")
    raise ValueError(value.key)


def test_arguments_to_oneself_are_copied(caller: Mesh) -> None:
    argument = [1]
    rref = zrpc.remote("worker0", list.copy, args=(argument,))
    argument.append(2)
    assert rref.to_here() == [1]


TIMED_OUT = re.escape("RRef creation via rpc.remote() timed out")


def until_timed_out(rref: Any) -> None:
    """Waits until the timeout of the call that makes the value is known here."""

    def known() -> Any:
        try:
            rref.to_here(timeout=0.01)
        except zrpc.RpcTimeoutError as error:
            return "RRef creation" in str(error)
        return False

    until(known, "the call has timed out")


def test_a_call_that_timed_out_shows_at_each_use(caller: Mesh) -> None:
    rref = zrpc.remote("worker1", wait_for, args=("never",), timeout=0.05)
    until_timed_out(rref)
    for use in (
        rref.to_here,
        lambda: rref.rpc_sync().upper(),
        lambda: rref.remote().upper(),
        lambda: rref.rpc_async().upper().wait(),
    ):
        with pytest.raises(zrpc.RpcTimeoutError, match=TIMED_OUT):
            use()
    event("never").set()


def test_a_call_to_oneself_that_timed_out(caller: Mesh) -> None:
    rref = zrpc.remote("worker0", wait_for, args=("never",), timeout=0.05)
    until_timed_out(rref)
    with pytest.raises(zrpc.RpcTimeoutError, match=TIMED_OUT):
        rref.to_here()
    event("never").set()


def test_the_value_of_a_call_that_timed_out_is_freed(mesh: Mesh) -> None:
    def at_user() -> None:
        rref = zrpc.remote("worker1", make_late, args=("late", "go"), timeout=0.05)
        until_timed_out(rref)

    mesh.run(0, at_user)
    event("go").set()
    assert is_freed("late")


@pytest.mark.zrpc(workers=2)
def test_after_a_shutdown_the_value_can_not_be_had(mesh: Mesh) -> None:
    user, owner = mesh.run(0, lambda: (zrpc.remote("worker1", max, args=(1, 2)), zrpc.RRef(3)))
    assert mesh.run(0, user.to_here) == 2
    mesh.run_all(zrpc.shutdown)
    with pytest.raises(zrpc.NotInitializedError, match=r"Cannot call to_here\(\) on it after"):
        user.to_here()
    with pytest.raises(zrpc.NotInitializedError, match="Cannot call fork an UserRRef after"):
        user._serialize()
    assert owner.to_here() == 3


@pytest.mark.system
@pytest.mark.zrpc(workers=1)
def test_a_shutdown_ends_the_wait_for_an_own_value(mesh: Mesh) -> None:
    with ThreadPoolExecutor(1) as other, Gate() as gate, mesh.agent(0).as_current():
        rref = zrpc.remote("worker0", gate.wait_inside)
        gate.await_entry()
        waits = other.submit(rref.local_value)
        until(lambda: rref._value and rref._value._followers)
        mesh.agent(0).shutdown(graceful=False)
        with pytest.raises(zrpc.NotInitializedError, match="this worker has shut down"):
            waits.result(SOON)

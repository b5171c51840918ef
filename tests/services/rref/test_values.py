"""How values are had from RRefs: here, at the owner, or the error that there is instead."""

from __future__ import annotations

import re
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import zrpc
from tests.services.rref.tracked import (
    SOON,
    Value,
    entries,
    is_freed,
    layers,
)
from tests.support.gates import Gate
from tests.support.identity import event
from tests.support.waiting import until
from zrpc.services.rref.messages import pack_id
from zrpc.testing import Mesh
from zrpc.wire.kind import Kind, Tag


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


def fail_with_what_cannot_travel() -> None:
    raise RuntimeError("about", event("a lock inside"))


def exit_handler() -> None:
    raise SystemExit(3)


# -- to_here -------------------------------------------------------------------------------


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


def test_to_here_times_out_and_can_be_tried_again(caller: Mesh) -> None:
    rref = zrpc.remote("worker1", wait_for, args=("go",))
    with pytest.raises(zrpc.RpcTimeoutError, match=r"timeout \(50 ms\) and will now be marked"):
        rref.to_here(timeout=0.05)
    event("go").set()
    assert rref.to_here() == "go"


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


def test_what_cannot_be_pickled_is_reported_and_kept(mesh: Mesh) -> None:
    def at_user() -> None:
        rref = zrpc.remote("worker1", Value, args=("stays",))
        for _ in range(2):
            with pytest.raises(zrpc.SerializationError, match="a Value stays where it is"):
                rref.to_here()
        assert rref.rpc_sync().get_key() == "stays"

    mesh.run(0, at_user)
    assert is_freed("stays")


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


# -- local_value ---------------------------------------------------------------------------


def test_local_value_is_for_the_owner(caller: Mesh) -> None:
    rref = zrpc.remote("worker1", list)
    with pytest.raises(
        RuntimeError,
        match=re.escape(
            f"For UserRRef(rref_id={rref._rref_id}, fork_id={rref._fork_id}), "
            "can't call localValue() on user WorkerInfo(id=0, name=worker0). "
            "Call it on owner WorkerInfo(id=1, name=worker1)"
        ),
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


# -- a function that fails -----------------------------------------------------------------


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


@pytest.mark.system
def test_an_error_shows_where_it_was_raised(caller: Mesh) -> None:
    rref = zrpc.remote("worker1", fail, args=(ValueError("no"),))
    with pytest.raises(ValueError, match="no") as caught:
        rref.to_here()
    text = "".join(traceback.format_exception(caught.value))
    assert "On WorkerInfo(id=1, name=worker1)" in text
    assert "in fail" in text


@pytest.mark.parametrize("function", [fail_with_what_cannot_travel, exit_handler])
def test_an_error_that_cannot_be_sent_arrives_as_text(caller: Mesh, function: Any) -> None:
    rref = zrpc.remote("worker1", function)
    for _ in range(2):
        with pytest.raises(
            zrpc.RemoteError, match="Original exception on remote side was"
        ) as caught:
            rref.to_here()
        assert function.__name__ in str(caught.value)


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


def test_arguments_that_cannot_be_pickled_raise_at_once(mesh: Mesh) -> None:
    def at_user() -> None:
        with pytest.raises(zrpc.SerializationError, match="a Value stays"):
            zrpc.remote("worker1", list, args=([Value("argument")],))

    mesh.run(0, at_user)
    for layer in layers(mesh):
        until(lambda layer=layer: entries(layer) == 0, "nothing is kept")


def test_arguments_to_oneself_are_copied(caller: Mesh) -> None:
    argument = [1]
    rref = zrpc.remote("worker0", list.copy, args=(argument,))
    argument.append(2)
    assert rref.to_here() == [1]


# -- a call that takes too long ------------------------------------------------------------

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


@pytest.mark.system
def test_a_waiting_to_here_gets_the_timeout(caller: Mesh) -> None:
    rref = zrpc.remote("worker1", wait_for, args=("never",), timeout=0.1)
    with pytest.raises(zrpc.RpcTimeoutError, match=TIMED_OUT):
        rref.to_here(timeout=1)
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


def make_late(key: Any, name: Any) -> Any:
    wait_for(name)
    return Value(key)


# -- after a shutdown ----------------------------------------------------------------------


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


@pytest.mark.zrpc(workers=2)
def test_the_pickler_of_torch_is_refused(mesh: Mesh) -> None:
    rref = mesh.run(0, zrpc.remote, "worker1", max, (1, 2))
    with pytest.raises(zrpc.RpcError, match="expected a call that sends UserRRef"):
        rref._serialize()

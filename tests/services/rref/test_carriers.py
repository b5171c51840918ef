"""A message that carries an RRef and comes to nothing keeps no value alive."""

from __future__ import annotations

from typing import Any

import pytest

import zrpc
from tests.services.rref.tracked import (
    SOON,
    Value,
    assert_empty,
    assert_kept,
    give,
    ignore,
    is_freed,
    key_of,
)
from tests.support.identity import event
from tests.support.waiting import until
from zrpc.testing import Mesh


class Stops:
    """Can't be pickled; what stands before it in a message has been."""

    def __reduce__(self) -> None:
        raise TypeError("stops here")


class StopsAtArrival:
    """Can't be rebuilt."""

    def __reduce__(self) -> Any:
        return _stop, ()


def _stop() -> None:
    raise TypeError("stops there")


def fail(*_args: Any) -> None:
    raise KeyError("fails")


def give_and_stop(rref: Any) -> Any:
    return [rref, Stops()]


def wait_at(name: Any, rref: Any) -> Any:
    assert event(name).wait(SOON)
    return rref


@pytest.fixture(params=["owner", "user"])
def kept(request: pytest.FixtureRequest, mesh: Mesh) -> Any:
    """worker0's RRef to a value of its own, or of worker1's, in a list; None once forgotten."""
    if request.param == "owner":
        return [mesh.run(0, lambda: zrpc.RRef(Value("value")))]
    rref = mesh.run(0, zrpc.remote, "worker1", Value, args=("value",))
    mesh.run(0, key_of, rref)
    return [rref]


def assert_kept_and_then_freed(mesh: Mesh, kept: Any) -> None:
    assert_kept(mesh, "value")
    assert mesh.run(0, key_of, kept[0]) == "value"
    kept.clear()
    assert is_freed("value")
    assert_empty(mesh)


@pytest.mark.parametrize("by", [zrpc.rpc_sync, zrpc.rpc_async, zrpc.remote])
def test_after_arguments_that_could_not_be_pickled(mesh: Mesh, kept: Any, by: Any) -> None:
    for _ in range(2):
        with pytest.raises(zrpc.SerializationError, match="stops here"):
            mesh.run(0, by, "worker1", ignore, args=(kept[0], Stops()))
    assert_kept_and_then_freed(mesh, kept)


def test_after_arguments_that_could_not_be_rebuilt(mesh: Mesh, kept: Any) -> None:
    with pytest.raises(zrpc.SerializationError, match="stops there"):
        mesh.run(0, zrpc.rpc_sync, "worker1", ignore, args=(kept[0], StopsAtArrival()))
    assert_kept_and_then_freed(mesh, kept)


def test_after_cloudpickle_had_to_try_again(mesh: Mesh, kept: Any) -> None:
    # The first pass hands on the RRef too, before it comes to the lambda.
    assert mesh.run(0, zrpc.rpc_sync, "worker1", ignore, args=(kept[0], lambda: 1)) is None
    assert_kept_and_then_freed(mesh, kept)


def test_after_the_function_has_failed(mesh: Mesh, kept: Any) -> None:
    with pytest.raises(KeyError):
        mesh.run(0, zrpc.rpc_sync, "worker1", fail, args=(kept[0],))
    assert_kept_and_then_freed(mesh, kept)


def test_after_the_function_was_not_found(mesh: Mesh, kept: Any) -> None:
    with pytest.raises(AttributeError):
        mesh.run(0, zrpc.rpc_sync, "worker1", getattr, args=(kept[0], "nothing_like_it"))
    assert_kept_and_then_freed(mesh, kept)


def test_after_the_call_has_timed_out(mesh: Mesh, kept: Any) -> None:
    with pytest.raises(zrpc.RpcTimeoutError):
        mesh.run(0, zrpc.rpc_sync, "worker1", wait_at, args=("go", kept[0]), timeout=0.05)
    assert_kept(mesh, "value")
    event("go").set()  # its answer has an RRef that nobody waits for
    assert_kept_and_then_freed(mesh, kept)


def test_after_the_answer_was_never_read(mesh: Mesh, kept: Any) -> None:
    future = mesh.run(0, zrpc.rpc_async, "worker1", give, args=(kept[0],))
    until(future.done, "the answer is there")
    del future
    assert_kept_and_then_freed(mesh, kept)


def test_after_the_future_was_dropped_at_once(mesh: Mesh, kept: Any) -> None:
    mesh.run(0, zrpc.rpc_async, "worker1", give, args=(kept[0],))
    assert_kept_and_then_freed(mesh, kept)


def test_after_the_answer_could_not_be_pickled(mesh: Mesh, kept: Any) -> None:
    for _ in range(2):
        with pytest.raises(zrpc.SerializationError, match="stops here"):
            mesh.run(0, zrpc.rpc_sync, "worker1", give_and_stop, args=(kept[0],))
    assert_kept_and_then_freed(mesh, kept)


def test_after_a_fetch_of_it_has_failed(mesh: Mesh, kept: Any) -> None:
    holder = mesh.run(0, zrpc.remote, "worker1", give_and_stop, args=(kept[0],))
    with pytest.raises(zrpc.SerializationError, match="stops here"):
        mesh.run(0, holder.to_here)
    del holder
    assert_kept_and_then_freed(mesh, kept)


def test_after_an_error_kept_it(mesh: Mesh, kept: Any) -> None:
    mesh.run(0, zrpc.remote, "worker1", fail, args=(kept[0],))
    assert_kept_and_then_freed(mesh, kept)


def test_an_error_that_is_kept_keeps_no_arguments(mesh: Mesh, kept: Any) -> None:
    rref = mesh.run(0, zrpc.remote, "worker1", fail, args=(kept[0],))
    with pytest.raises(KeyError):
        mesh.run(0, rref.to_here)
    kept.clear()
    assert is_freed("value")
    assert rref.owner_name() == "worker1"


def test_after_an_unknown_destination(mesh: Mesh, kept: Any) -> None:
    with pytest.raises(zrpc.RpcError, match="could not find destination"):
        mesh.run(0, zrpc.rpc_sync, "worker9", ignore, args=(kept[0],))
    assert_kept_and_then_freed(mesh, kept)


def test_a_call_in_progress_keeps_its_rref(mesh: Mesh) -> None:
    def at_user() -> Any:
        rref = zrpc.remote("worker1", Value, args=("called",))
        return rref.rpc_async().wait_for("go")

    future = mesh.run(0, at_user)
    assert_kept(mesh, "called")
    event("go").set()
    assert future.wait() == "called"
    del future
    assert is_freed("called")
    assert_empty(mesh)

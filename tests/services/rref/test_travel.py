"""RRefs in anything that is sent, from anybody to anybody; what comes to nothing keeps no value."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

import zrpc
from tests.services.rref.tracked import (
    Value,
    assert_empty,
    assert_kept,
    ended,
    give,
    ignore,
    is_freed,
    key_of,
    make_late,
)
from tests.support.identity import event
from tests.support.waiting import SOON, until
from zrpc.testing import Mesh


def owner_and_key(rref: Any) -> Any:
    return rref.owner_name(), rref.is_owner(), key_of(rref)


WORKERS = ["worker0", "worker1", "worker2"]


def send(owner: str, to: str, key: str) -> Any:
    return zrpc.rpc_sync(to, owner_and_key, args=(zrpc.remote(owner, Value, args=(key,)),))


def receive(owner: str, sender: str, key: str) -> Any:
    return owner_and_key(zrpc.rpc_sync(sender, zrpc.remote, args=(owner, Value, (key,))))


@pytest.mark.system
@pytest.mark.zrpc(workers=3)
def test_from_anybody_to_anybody(mesh: Mesh) -> None:
    # Among them: owner to user, user to owner, user to user, to oneself, all three one.
    for owner, sender, receiver in itertools.product(WORKERS, repeat=3):
        sent, got = (f"{each} {owner} {sender} {receiver}" for each in ("sent", "got"))
        is_owner = receiver == owner
        assert mesh.run(sender, send, owner, receiver, sent) == (owner, is_owner, sent)
        assert mesh.run(receiver, receive, owner, sender, got) == (owner, is_owner, got)
        assert is_freed(sent)
        assert is_freed(got)
    assert_empty(mesh)


def test_handed_on_while_it_is_being_made(mesh: Mesh) -> None:
    def at_user() -> None:
        rref = zrpc.remote("worker1", make_late, args=("late", "go"))
        results = [
            zrpc.rpc_async(to, key_of, args=(rref,)) for to in ("worker0", "worker1", "worker0")
        ]
        del rref
        event("go").set()
        assert torch.futures.wait_all(results) == ["late"] * 3

    mesh.run(0, at_user)
    assert is_freed("late")
    assert_empty(mesh)


class Node:
    """Refers to itself."""

    def __init__(self, rref: Any) -> None:
        self.rref = rref
        self.me = self


WRAPPERS: list[tuple[Callable[[Any], Any], Callable[[Any], Any]]] = [
    (lambda r: (1, {"a": [r]}), lambda w: w[1]["a"][0]),
    (lambda r: {r: 1}, lambda w: next(iter(w))),
    (lambda r: {r}, lambda w: next(iter(w))),
    (lambda r: [r, 1, r], lambda w: w[0] if w[0] is w[2] else None),  # as any object in a pickle
    (lambda r: Node(r), lambda w: w.me.me.rref),
    (lambda r: partial(give, r), lambda w: w()),
    (lambda r: lambda: r, lambda w: w()),
    (lambda r: lambda x=r: x, lambda w: w()),
    (lambda r: [torch.ones(3), r, torch.ones(10_000)], lambda w: w[1]),
    (lambda r: ValueError(r), lambda w: w.args[0]),
]


def test_inside_of_anything(mesh: Mesh) -> None:
    def at_user(wrap: Any, unwrap: Any) -> None:
        rref = zrpc.remote("worker1", Value, args=("inside",))
        back = unwrap(zrpc.rpc_sync("worker1", give, args=(wrap(rref),)))
        assert back == rref
        assert key_of(back) == "inside"
        own = zrpc.RRef(Value("own"))
        back = unwrap(zrpc.rpc_sync("worker1", give, args=(wrap(own),)))
        assert back.local_value() is own.local_value()

    for wrap, unwrap in WRAPPERS:
        mesh.run(0, at_user, wrap, unwrap)
        for key in ("inside", "own"):
            assert is_freed(key)
            ended(key).clear()
    assert_empty(mesh)


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


def call(function: Any, *more: Any, to: str = "worker1", by: Any = zrpc.rpc_sync) -> Any:
    """Returns what calls a function on worker1 with an RRef, and with more."""
    return lambda rref: by(to, function, args=(rref, *more))


def fetch_what_stops(rref: Any) -> None:
    zrpc.remote("worker1", give_and_stop, args=(rref,)).to_here()


def wait_and_read_nothing(rref: Any) -> None:
    until(zrpc.rpc_async("worker1", give, args=(rref,)).done, "the answer is there")


NOT_PICKLED = zrpc.SerializationError, "stops here"
# What carries an RRef, and the error that ends it.
CARRIERS = [
    *((call(ignore, Stops(), by=by), NOT_PICKLED) for by in (zrpc.rpc_sync, zrpc.rpc_async)),
    (call(ignore, Stops(), by=zrpc.remote), NOT_PICKLED),
    (call(ignore, StopsAtArrival()), (zrpc.SerializationError, "stops there")),
    # Goes by cloudpickle. The first pass hands on the RRef too, before it comes to the lambda.
    (call(ignore, lambda: 1), None),
    (call(fail), (KeyError, "fails")),
    (call(getattr, "no_such_name"), (AttributeError, "no_such_name")),
    (wait_and_read_nothing, None),
    (call(give, by=zrpc.rpc_async), None),  # the future is dropped at once
    (call(give_and_stop), NOT_PICKLED),
    (fetch_what_stops, NOT_PICKLED),
    (call(fail, by=zrpc.remote), None),
    (call(ignore, to="worker9"), (zrpc.RpcError, "could not find destination")),
]


def test_what_comes_to_nothing_keeps_no_value(mesh: Mesh, kept: Any) -> None:
    for carry, error in CARRIERS:
        for _ in range(2):
            with pytest.raises(error[0], match=error[1]) if error else nullcontext():
                mesh.run(0, carry, kept[0])
        assert_kept(mesh, "value")
        assert mesh.run(0, key_of, kept[0]) == "value"
    assert_kept_and_then_freed(mesh, kept)


def test_after_the_call_has_timed_out(mesh: Mesh, kept: Any) -> None:
    with pytest.raises(zrpc.RpcTimeoutError):
        mesh.run(0, zrpc.rpc_sync, "worker1", wait_at, args=("go", kept[0]), timeout=0.05)
    assert_kept(mesh, "value")
    event("go").set()  # its answer has an RRef that nobody waits for
    assert_kept_and_then_freed(mesh, kept)


def test_an_error_that_is_kept_keeps_no_arguments(mesh: Mesh, kept: Any) -> None:
    rref = mesh.run(0, zrpc.remote, "worker1", fail, args=(kept[0],))
    with pytest.raises(KeyError):
        mesh.run(0, rref.to_here)
    kept.clear()
    assert is_freed("value")
    assert rref.owner_name() == "worker1"

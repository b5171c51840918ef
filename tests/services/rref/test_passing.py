"""RRefs in arguments, results, containers, objects and closures, from anybody to anybody."""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque, namedtuple
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch

import zrpc
from tests.services.rref.tracked import (
    SOON,
    Value,
    assert_empty,
    is_freed,
    layers,
)
from tests.support.identity import event
from tests.support.waiting import until
from zrpc.testing import Mesh

Pair = namedtuple("Pair", "a b")


@dataclass
class Holder:
    rref: zrpc.RRef
    more: list = field(default_factory=list)


class Node:
    """Refers to itself."""

    def __init__(self, rref: Any) -> None:
        self.rref = rref
        self.me = self


def key_of(rref: Any) -> Any:
    return rref.rpc_sync().get_key()


def identity(value: Any) -> Any:
    return value


def make_own(key: Any) -> Any:
    return zrpc.RRef(Value(key))


def owner_and_key(rref: Any) -> Any:
    return rref.owner_name(), rref.is_owner(), key_of(rref)


WORKERS = ["worker0", "worker1", "worker2"]


@pytest.mark.zrpc(workers=3)
@pytest.mark.parametrize(
    ("owner", "sender", "receiver"), list(itertools.product(WORKERS, repeat=3))
)
def test_as_argument_from_anybody_to_anybody(
    mesh: Mesh, owner: Any, sender: Any, receiver: Any
) -> None:
    # Among them: owner to user, user to owner, user to user, to oneself, all three one.
    def at_sender() -> Any:
        rref = zrpc.remote(owner, Value, args=("value",))
        return zrpc.rpc_sync(receiver, owner_and_key, args=(rref,))

    assert mesh.run(sender, at_sender) == (owner, receiver == owner, "value")
    assert is_freed("value")
    assert_empty(mesh)


@pytest.mark.zrpc(workers=3)
@pytest.mark.parametrize(
    ("owner", "sender", "receiver"), list(itertools.product(WORKERS, repeat=3))
)
def test_as_result_from_anybody_to_anybody(
    mesh: Mesh, owner: Any, sender: Any, receiver: Any
) -> None:
    def at_receiver() -> Any:
        return owner_and_key(zrpc.rpc_sync(sender, zrpc.remote, args=(owner, Value, ("value",))))

    assert mesh.run(receiver, at_receiver) == (owner, receiver == owner, "value")
    assert is_freed("value")
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


def make_late(key: Any, name: Any) -> Any:
    assert event(name).wait(SOON)
    return Value(key)


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda r: [r], lambda w: w[0]),
        (lambda r: (1, (r,)), lambda w: w[1][0]),
        (lambda r: {"a": {"b": r}}, lambda w: w["a"]["b"]),
        (lambda r: {r: 1}, lambda w: next(iter(w))),
        (lambda r: {r}, lambda w: next(iter(w))),
        (lambda r: Pair(1, r), lambda w: w.b),
        (lambda r: deque([r]), lambda w: w[0]),
        (lambda r: OrderedDict(a=r), lambda w: w["a"]),
        (lambda r: Holder(r), lambda w: w.rref),
        (lambda r: Holder(None, [Holder(r)]), lambda w: w.more[0].rref),
        (lambda r: Node(r), lambda w: w.me.me.rref),
        (lambda r: partial(identity, r), lambda w: w()),
        (lambda r: partial(identity, value=r), lambda w: w()),
        (lambda r: lambda: r, lambda w: w()),
        (lambda r: lambda x=r: x, lambda w: w()),
        (lambda r: [torch.ones(3), r, torch.ones(10_000)], lambda w: w[1]),
        (lambda r: ValueError(r), lambda w: w.args[0]),
    ],
)
def test_inside_of_anything(mesh: Mesh, wrap: Any, unwrap: Any) -> None:
    def at_user() -> None:
        rref = zrpc.remote("worker1", Value, args=("inside",))
        back = unwrap(zrpc.rpc_sync("worker1", identity, args=(wrap(rref),)))
        assert back == rref
        assert key_of(back) == "inside"
        own = zrpc.RRef(Value("own"))
        back = unwrap(zrpc.rpc_sync("worker1", identity, args=(wrap(own),)))
        assert back.local_value() is own.local_value()

    mesh.run(0, at_user)
    assert is_freed("inside")
    assert is_freed("own")
    assert_empty(mesh)


def test_as_a_keyword_argument(mesh: Mesh) -> None:
    def at_user() -> None:
        rref = zrpc.remote("worker1", Value, args=("key",))
        assert zrpc.rpc_sync("worker1", key_of, kwargs={"rref": rref}) == "key"
        assert zrpc.rpc_async("worker1", key_of, kwargs={"rref": rref}).wait() == "key"
        assert zrpc.remote("worker1", key_of, kwargs={"rref": rref}).to_here() == "key"

    mesh.run(0, at_user)
    assert is_freed("key")


def test_in_a_closure_that_is_called_there(mesh: Mesh) -> None:
    def at_user() -> None:
        rref = zrpc.remote("worker1", Value, args=("closed",))
        assert zrpc.rpc_sync("worker1", lambda: rref.is_owner() and key_of(rref)) == "closed"
        assert zrpc.remote("worker1", lambda: key_of(rref)).to_here() == "closed"

    mesh.run(0, at_user)
    assert is_freed("closed")
    assert_empty(mesh)


def test_methods_and_proxies_of_rrefs_travel(mesh: Mesh) -> None:
    def at_user() -> None:
        rref = zrpc.remote("worker1", list, args=((1, 2),))
        assert zrpc.rpc_sync("worker1", rref.to_here) == [1, 2]
        assert zrpc.rpc_sync("worker1", rref.owner_name) == "worker1"

    mesh.run(0, at_user)
    assert_empty(mesh)


def test_twice_in_one_message(mesh: Mesh) -> None:
    def at_user() -> None:
        rref = zrpc.remote("worker1", Value, args=("twice",))
        other = zrpc.remote("worker1", Value, args=("other",))
        first, second, again = zrpc.rpc_sync("worker1", identity, args=([rref, other, rref],))
        assert first is again  # as any object in one pickle
        assert (first, second) == (rref, other)

    mesh.run(0, at_user)
    assert is_freed("twice")
    assert is_freed("other")


def test_as_argument_of_a_method_by_proxy(mesh: Mesh) -> None:
    def at_user() -> None:
        values = zrpc.remote("worker1", list)
        values.rpc_sync().append(zrpc.RRef(Value("appended")))
        [back] = values.to_here()
        assert back.is_owner()
        assert back.local_value().key == "appended"
        values.rpc_sync().clear()

    mesh.run(0, at_user)
    assert is_freed("appended")
    assert_empty(mesh)


@pytest.mark.system
def test_a_value_that_holds_rrefs_keeps_what_they_refer_to(mesh: Mesh) -> None:
    def at_user() -> Any:
        inner = zrpc.remote("worker0", Value, args=("inner",))
        outer = zrpc.remote("worker1", Holder, args=(inner,))
        outer.to_here()
        return outer

    outer = mesh.run(0, at_user)
    held = mesh.run(0, lambda o: key_of(o.to_here().rref), outer)
    assert held == "inner"
    del outer
    assert is_freed("inner")


@pytest.mark.zrpc(workers=4)
def test_along_a_chain_of_workers(mesh: Mesh) -> None:
    def at_first() -> Any:
        rref = zrpc.remote("worker1", Value, args=("passed on",))
        return zrpc.rpc_sync("worker2", pass_on, args=(rref, ["worker3", "worker0", "worker2"] * 5))

    assert mesh.run(0, at_first) == "passed on"
    assert is_freed("passed on")
    assert_empty(mesh)


def pass_on(rref: Any, workers: Any) -> Any:
    if not workers:
        return key_of(rref)
    return zrpc.rpc_sync(workers[0], pass_on, args=(rref, workers[1:]))


@pytest.mark.zrpc(workers=3)
def test_the_owner_lists_the_holders(mesh: Mesh) -> None:
    def at_owner() -> Any:
        rref = zrpc.RRef(Value("listed"))
        holders = [zrpc.remote(to, Holder, args=(rref,)) for to in (1, 2, 2)]
        for holder in holders:
            holder.rpc_sync().__repr__()
        return rref, holders

    rref, holders = mesh.run(0, at_owner)
    owned = layers(mesh)[0].references._owned[rref._rref_id]
    assert sorted(owned.forks.values()) == [1, 2, 2]
    del holders
    until(lambda: not owned.forks, "no holders")


def fail_with(rref: Any) -> None:
    raise ValueError("holds", rref)


def test_in_an_exception(mesh: Mesh) -> None:
    def at_user() -> None:
        rref = zrpc.remote("worker1", Value, args=("in an error",))
        with pytest.raises((ValueError, zrpc.RemoteError), match=r"holds|UserRRef|OwnerRRef"):
            zrpc.rpc_sync("worker1", fail_with, args=(rref,))
        assert key_of(rref) == "in an error"

    mesh.run(0, at_user)
    assert is_freed("in an error")
    assert_empty(mesh)

"""RRefs in arguments, results, containers, objects and closures, from anybody to anybody."""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable
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
    ended,
    is_freed,
)
from tests.support.identity import event
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


def owner_and_key(rref: Any) -> Any:
    return rref.owner_name(), rref.is_owner(), key_of(rref)


WORKERS = ["worker0", "worker1", "worker2"]


@pytest.mark.system
@pytest.mark.zrpc(workers=3)
@pytest.mark.parametrize("owner", WORKERS)
def test_from_anybody_to_anybody(mesh: Mesh, owner: str) -> None:
    # Among them: owner to user, user to owner, user to user, to oneself, all three one.
    for sender, receiver in itertools.product(WORKERS, repeat=2):
        as_argument, as_result = f"to {receiver} of {sender}", f"from {sender} to {receiver}"

        def send(to: str = receiver, key: str = as_argument) -> Any:
            rref = zrpc.remote(owner, Value, args=(key,))
            return zrpc.rpc_sync(to, owner_and_key, args=(rref,))

        def receive(sender: str = sender, key: str = as_result) -> Any:
            return owner_and_key(zrpc.rpc_sync(sender, zrpc.remote, args=(owner, Value, (key,))))

        assert mesh.run(sender, send) == (owner, receiver == owner, as_argument)
        assert mesh.run(receiver, receive) == (owner, receiver == owner, as_result)
        assert is_freed(as_argument)
        assert is_freed(as_result)
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


WRAPPERS: list[tuple[Callable[[Any], Any], Callable[[Any], Any]]] = [
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
]


def test_inside_of_anything(mesh: Mesh) -> None:
    def at_user(wrap: Any, unwrap: Any) -> None:
        rref = zrpc.remote("worker1", Value, args=("inside",))
        back = unwrap(zrpc.rpc_sync("worker1", identity, args=(wrap(rref),)))
        assert back == rref
        assert key_of(back) == "inside"
        own = zrpc.RRef(Value("own"))
        back = unwrap(zrpc.rpc_sync("worker1", identity, args=(wrap(own),)))
        assert back.local_value() is own.local_value()

    for wrap, unwrap in WRAPPERS:
        mesh.run(0, at_user, wrap, unwrap)
        for key in ("inside", "own"):
            assert is_freed(key)
            ended(key).clear()
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

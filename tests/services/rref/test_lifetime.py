"""A value lives as long as a reference to it does anywhere, and not much longer."""

from __future__ import annotations

import errno
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import zmq

import zrpc
from tests.services.rref.tracked import (
    Value,
    assert_empty,
    assert_kept,
    entries,
    give,
    is_freed,
    key_of,
    layers,
    make_late,
    rest,
)
from tests.support.identity import emptied, event
from tests.support.io_threads import io_thread_held
from tests.support.observed import calls_to
from tests.support.refusals import refusing
from tests.support.waiting import until
from zrpc.testing import Mesh

KEPT: dict[str, Any] = emptied({})


def keep(name: Any, value: Any) -> None:
    KEPT[name] = value


def let_go(name: Any) -> None:
    del KEPT[name]


@pytest.mark.system
def test_the_end_of_many_is_sent_in_few_messages(mesh: Mesh) -> None:
    count = 600
    rrefs = [mesh.run(0, zrpc.remote, "worker1", Value, args=(f"{i}",)) for i in range(count)]
    until(lambda: all(rref.confirmed_by_owner() for rref in rrefs))
    before = calls_to(mesh, 1).bytes_sent
    with io_thread_held(mesh, 0):  # it looks at what was dropped together
        rrefs.clear()
    assert all(is_freed(f"{i}") for i in range(count))
    # One message of the protocol has 45 bytes, without the header of that which brings it.
    assert 45 * count < calls_to(mesh, 1).bytes_sent - before < 48 * count
    assert_empty(mesh)


def test_a_value_is_freed_whose_rref_ended_before_it_was_made(mesh: Mesh) -> None:
    mesh.run(0, zrpc.remote, "worker1", make_late, args=("late", "go"))
    event("go").set()
    assert is_freed("late")
    assert_empty(mesh)


@pytest.mark.parametrize("to", ["worker0", "worker1"])
def test_a_value_is_freed_whose_rref_ended_before_its_call_was_read(mesh: Mesh, to: str) -> None:
    with io_thread_held(mesh, to):
        mesh.run(0, zrpc.remote, to, Value, args=("unread",))
    assert is_freed("unread")
    assert_empty(mesh)


@pytest.mark.parametrize("to", [0, 1])
def test_a_call_that_can_not_be_sent(mesh: Mesh, to: int) -> None:
    with (
        refusing(mesh.agent(0), lambda *_: zmq.ZMQError(errno.ENOMEM)),
        pytest.raises(MemoryError, match="can't be sent"),
    ):
        mesh.run(0, zrpc.remote, to, Value, args=("unsent",))
    rest(mesh)
    assert_empty(mesh)


@pytest.mark.zrpc(workers=3)
def test_the_last_rref_may_be_anywhere(mesh: Mesh) -> None:
    for last in ("worker0", "worker1", "worker2"):
        key = f"last on {last}"
        rref = mesh.run(0, zrpc.remote, "worker1", Value, args=(key,))
        mesh.run(0, zrpc.rpc_sync, last, keep, args=("last", rref))
        del rref
        assert_kept(mesh, key)
        assert mesh.run(last, lambda: key_of(KEPT["last"])) == key
        mesh.run(last, let_go, "last")
        assert is_freed(key)
        assert_empty(mesh)


@pytest.mark.system
@pytest.mark.zrpc(workers=3)
def test_many_threads_create_hand_on_and_drop(mesh: Mesh) -> None:
    def work(seed: Any) -> None:
        draw = random.Random(seed)
        rrefs = []
        for n in range(60):
            what = draw.randrange(5)
            to = draw.randrange(3)
            if what == 0 or not rrefs:
                rrefs.append((zrpc.remote(to, Value, args=(n,)), n))
            elif what == 1:
                rrefs.append((zrpc.RRef(Value(n)), n))
            elif what == 2:
                rref, number = draw.choice(rrefs)
                rrefs.append((zrpc.rpc_sync(to, give, args=(rref,)), number))
            elif what == 3:
                rref, number = rrefs.pop(draw.randrange(len(rrefs)))
                assert zrpc.rpc_sync(to, key_of, args=(rref,)) == number
            else:
                rref, number = draw.choice(rrefs)
                assert key_of(rref) == number

    def work_at(rank: Any, seed: Any) -> None:
        with mesh.agent(rank).as_current():
            work(seed)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(work_at, [0, 1, 2] * 4, range(12)))
    assert_empty(mesh)


def test_an_error_that_was_raised_at_the_owner_keeps_no_rref(mesh: Mesh) -> None:
    def at_owner() -> None:
        for ask in (zrpc.RRef.to_here, zrpc.RRef.local_value):
            with pytest.raises(ValueError, match="invalid literal"):
                ask(zrpc.remote("worker0", int, args=("no number",)))

    mesh.run(0, at_owner)
    until(lambda: entries(layers(mesh)[0]) == 0, collect=True)


def test_finalizers_run_anywhere(mesh: Mesh) -> None:
    # Dropped while the lock of the layer is held, as the garbage collector may do it.
    rref = mesh.run(0, lambda: zrpc.RRef(Value("dropped")))
    [layer, _] = layers(mesh)
    with layer.lock:
        del rref
    assert is_freed("dropped")
    rest(mesh)

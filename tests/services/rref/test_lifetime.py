"""A value lives as long as a reference to it does anywhere, and not much longer."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import zmq

import zrpc
from tests.services.rref.tracked import (
    SOON,
    Value,
    assert_empty,
    assert_kept,
    entries,
    give,
    ignore,
    is_freed,
    key_of,
    layers,
    make_late,
    rest,
)
from tests.support.identity import event
from tests.support.refusals import refusing
from tests.support.waiting import until
from zrpc.testing import Mesh
from zrpc.wire.kind import Kind

KEPT: dict[str, object] = {}


@pytest.fixture(autouse=True)
def _forget_kept() -> Iterator[Any]:
    yield
    KEPT.clear()


def keep(name: Any, value: Any) -> None:
    KEPT[name] = value


def let_go(name: Any) -> None:
    del KEPT[name]


def test_a_value_ends_with_its_only_rref(mesh: Mesh) -> None:
    rref = mesh.run(0, lambda: zrpc.RRef(Value("own")))
    assert_kept(mesh, "own")
    del rref
    assert is_freed("own")
    assert_empty(mesh)


@pytest.mark.system
def test_the_end_of_many_is_sent_in_few_messages(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, count = mesh.agent(0), 600  # two messages and a bit
    rrefs = [mesh.run(0, zrpc.remote, "worker1", Value, args=(f"{i}",)) for i in range(count)]
    until(lambda: all(rref.confirmed_by_owner() for rref in rrefs))
    sent, post = [], agent.outbox.post

    def note(rank: Any, message: Any, *args: Any, **kwargs: Any) -> None:
        sent.append(message.kind)
        post(rank, message, *args, **kwargs)

    monkeypatch.setattr(agent.outbox, "post", note)
    dropped, told = threading.Event(), threading.Event()
    # All together: the I/O thread waits meanwhile, and looks at what was dropped afterwards.
    agent.receiver.in_io_thread(lambda: (told.set(), dropped.wait(SOON)))
    assert told.wait(SOON)
    rrefs.clear()
    dropped.set()
    assert all(is_freed(f"{i}") for i in range(count))
    assert sent.count(Kind.REFERENCE) == 3
    assert_empty(mesh)


def test_a_value_is_freed_whose_rref_ended_before_it_was_made(mesh: Mesh) -> None:
    mesh.run(0, zrpc.remote, "worker1", make_late, args=("late", "go"))
    event("go").set()
    assert is_freed("late")
    assert_empty(mesh)


@pytest.mark.parametrize("to", ["worker0", "worker1"])
def test_a_value_is_freed_whose_rref_ended_before_its_call_was_read(mesh: Mesh, to: str) -> None:
    agent, held, go = mesh.agent(to), threading.Event(), threading.Event()
    agent.receiver.in_io_thread(lambda: (held.set(), go.wait(SOON)))
    assert held.wait(SOON)
    mesh.run(0, zrpc.remote, to, Value, args=("unread",))
    go.set()  # next this worker looks at what was dropped, and only then at messages
    assert is_freed("unread")
    assert_empty(mesh)


def test_a_call_to_oneself_that_timed_out_before_it_was_read(mesh: Mesh) -> None:
    agent, held, go = mesh.agent(0), threading.Event(), threading.Event()

    def call() -> Any:
        zrpc.rpc_async("worker0", ignore)  # is read first, and what was dropped is told after it
        return zrpc.remote("worker0", Value, args=("late",), timeout=0.01)

    def hold() -> None:
        held.set()
        assert go.wait(SOON)
        until(lambda: time.monotonic() > deadline, "the time is over")

    agent.receiver.in_io_thread(hold)
    assert held.wait(SOON)
    mesh.run(0, call)
    deadline = time.monotonic() + 0.02
    go.set()
    assert is_freed("late")
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
                rrefs.append((zrpc.remote(to, Box, args=(n,)), n))
            elif what == 1:
                rrefs.append((zrpc.RRef(Box(n)), n))
            elif what == 2:
                rref, number = draw.choice(rrefs)
                rrefs.append((zrpc.rpc_sync(to, give, args=(rref,)), number))
            elif what == 3:
                rref, number = rrefs.pop(draw.randrange(len(rrefs)))
                assert zrpc.rpc_sync(to, member_id_of, args=(rref,)) == number
            else:
                rref, number = draw.choice(rrefs)
                assert rref.rpc_sync().get() == number

    def work_at(rank: Any, seed: Any) -> None:
        with mesh.agent(rank).as_current():
            work(seed)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(work_at, [0, 1, 2] * 4, range(12)))
    assert_empty(mesh)


class Box:
    def __init__(self, number: Any) -> None:
        self.number = number

    def get(self) -> Any:
        return self.number


def member_id_of(rref: Any) -> Any:
    return rref.rpc_sync().get()


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


ELEMENTS = 250_000  # a million bytes


def produce(seed: Any) -> Any:
    return torch.full((ELEMENTS,), float(seed))


def combine(first: Any, second: Any) -> Any:
    """Fetches both from wherever they are."""
    return first.to_here() + second.to_here()


def total(rref: Any) -> Any:
    return rref.to_here().sum().item()


class Received:
    """Counts the bytes that arrive at a worker, by listening at its inbox."""

    def __init__(self, agent: Any) -> None:
        self.bytes = 0
        receive = agent.network.receive

        def count(*arguments: Any) -> Any:
            received = receive(*arguments)
            if received is not None:
                _, first, buffers = received
                self.bytes += len(first) + sum(len(bytes(buffer)) for buffer in buffers)
            return received

        agent.network.receive = count


# Without shared memory, all data comes to the inboxes.
@pytest.mark.zrpc(workers=5, options={"shared_memory": 0})
def test_no_data_goes_through_the_coordinator(mesh: Mesh) -> None:
    received = [Received(mesh.agent(rank)) for rank in range(5)]

    def coordinate() -> Any:
        first = zrpc.remote("worker1", produce, args=(1,))
        second = zrpc.remote("worker2", produce, args=(2,))
        sum_ = zrpc.remote("worker3", combine, args=(first, second))
        return zrpc.rpc_sync("worker4", total, args=(sum_,))

    assert mesh.run(0, coordinate) == 3.0 * ELEMENTS
    size = 4 * ELEMENTS
    assert received[3].bytes > 2 * size  # the counting counts
    assert received[4].bytes > size
    assert received[0].bytes < 20_000
    assert received[1].bytes < 20_000
    assert_empty(mesh)

"""A value lives as long as a reference to it does anywhere, and not much longer."""

from __future__ import annotations

import contextlib
import errno
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
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
from tests.services.shm.sharing import drop, keep, kept
from tests.support.gates import Gate
from tests.support.identity import event
from tests.support.io_threads import io_thread_held
from tests.support.observed import calls_to, living
from tests.support.refusals import refusing
from tests.support.steps import at_step, interrupt, some_steps
from tests.support.waiting import until
from zrpc.services.shm.service import SharedMemoryService
from zrpc.testing import Mesh
from zrpc.wire.kind import Kind
from zrpc.wire.message import Message


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
        assert mesh.run(last, lambda: key_of(kept()["last"])) == key
        mesh.run(last, drop, "last")
        assert is_freed(key)
        assert_empty(mesh)


@pytest.mark.system
@pytest.mark.zrpc(workers=3)
def test_many_threads_create_hand_on_and_drop(mesh: Mesh) -> None:
    def work(seed: int) -> None:
        draw, rrefs = random.Random(seed), []
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

    def work_at(seed: int) -> None:
        with mesh.agent(seed % 3).as_current():
            work(seed)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(work_at, range(12)))
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


# -- orders of events that are rare: each test makes one of them happen ------------------------


class Held:
    """Messages of one kind that a worker has sent, and that are held in flight.

    So are its questions after calls: they do not overtake a call, which would count as lost then.
    """

    def __init__(self, mesh: Mesh, rank: int, kind: Kind) -> None:
        self._network, self._kind = mesh.agent(rank).network, kind
        self._send, self._kept = self._network.send, []
        self._network.send = self._hold  # type: ignore[method-assign]

    def _hold(self, peer: Any, first: Any, *rest: Any) -> None:
        if first[1] in (self._kind, Kind.ASK):
            self._kept.append((peer, first, *rest))
        else:
            self._send(peer, first, *rest)

    def __len__(self) -> int:
        return sum(first[1] == self._kind for _, first, *_ in self._kept)

    def arrive(self) -> None:
        del self._network.send
        for message in self._kept:
            self._send(*message)


# -- the value whose method makes another one ------------------------------------------------


def test_a_value_lives_until_the_call_of_its_method_has_come(mesh: Mesh) -> None:
    """The call is large, so the end of the RRef may overtake it."""
    with mesh.agent(0).as_current():
        rref = zrpc.remote("worker1", Value, args=("subject",))
        assert rref.remote().get_key().to_here() == "subject"  # now the name is known
        under_way = Held(mesh, 0, Kind.REMOTE)
        made = rref.remote().get_key()
        assert len(under_way) == 1
        del rref
        try:
            assert_kept(mesh, "subject")
        finally:
            under_way.arrive()
        assert made.to_here(timeout=2) == "subject"
    del made
    assert is_freed("subject")
    assert_empty(mesh)


def test_an_own_value_lives_until_the_call_of_its_method_has_come(mesh: Mesh) -> None:
    with mesh.agent(0).as_current():
        rref = zrpc.RRef(Value("own subject"))
        assert rref.remote().get_key().to_here() == "own subject"
        with io_thread_held(mesh, 0):
            made = rref.remote().get_key()
            del rref
        assert made.to_here() == "own subject"
    del made
    assert is_freed("own subject")
    assert_empty(mesh)


@pytest.mark.parametrize("way", ["remote", "rpc_async"])
def test_a_call_of_a_method_comes_when_its_caller_has_given_it_up(mesh: Mesh, way: str) -> None:
    """Its value has been freed by then; the call must neither wait for it nor be kept."""
    with mesh.agent(0).as_current():
        rref = zrpc.remote("worker1", Value, args=("given up",))
        assert rref.remote().get_key().to_here() == "given up"
        under_way = Held(mesh, 0, Kind.REMOTE if way == "remote" else Kind.METHOD)
        made = getattr(rref, way)(timeout=0.05).get_key()
        until(lambda: not len(mesh.agent(0).caller.calls), "the call has timed out")
        del rref
        assert is_freed("given up")
        under_way.arrive()
        rest(mesh)
        until(lambda: not mesh.agent(1).callee.requests.all(), "nothing waits", within=2)
        if way == "rpc_async":
            with pytest.raises(zrpc.RpcTimeoutError):
                made.wait()
    del made
    assert_empty(mesh)


# -- a call that does not come -----------------------------------------------------------------


@pytest.mark.zrpc(options={"max_bytes_in_flight": 1})
def test_a_call_that_is_not_sent_in_time_leaves_nothing(mesh: Mesh) -> None:
    with mesh.agent(0).as_current(), Gate() as gate:
        running = zrpc.rpc_async("worker1", gate.wait_inside)
        gate.await_entry()
        rref = zrpc.remote("worker1", Value, args=("unsent",), timeout=0.05)
        with pytest.raises(zrpc.RpcTimeoutError, match="max_bytes_in_flight"):
            rref.to_here()
        gate.open()
        running.wait()
        del rref
        rest(mesh)
    assert_empty(mesh)


def lack_descriptors(*_: Any) -> None:
    raise OSError(errno.EMFILE, "Too many open files")


@pytest.mark.zrpc(workers=3)
@pytest.mark.parametrize("asked", ["before", "after"])
def test_others_learn_that_a_value_is_never_made(
    caller: Mesh, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """They ask the owner before it knows that itself, or after.

    It has no descriptor left for the shared memory in which the arguments are.
    """
    large = torch.ones(1 << 18)
    zrpc.rpc_sync("worker1", torch.sum, args=(large,))
    told = Held(caller, 0, Kind.REFERENCE)
    with monkeypatch.context() as patched:
        loans = caller.agent(1).service(SharedMemoryService).loans
        patched.setattr(loans, "borrow", lack_descriptors)
        rref = zrpc.remote("worker1", torch.sum, args=(large,))
        until(lambda: len(told), "the creator knows it")
    if asked == "after":
        told.arrive()
    other = zrpc.rpc_async("worker2", zrpc.RRef.to_here, args=(rref, 5))
    if asked == "before":
        until(lambda: caller.agent(1).callee.requests.all(), "the owner is asked")
        told.arrive()
    with pytest.raises(zrpc.RpcError, match="never made"):
        other.wait()
    with pytest.raises(OSError, match="Too many open files"):
        rref.to_here(timeout=20)
    del rref, other
    rest(caller)
    assert_empty(caller)


@pytest.mark.system
def test_ctrl_c_leaves_nothing_of_an_rref(caller: Mesh) -> None:
    for make in (
        lambda: zrpc.RRef(Value("own")),
        lambda: zrpc.remote("worker0", Value, args=("own",)),
        lambda: zrpc.remote("worker1", Value, args=("own",)),
    ):
        for number in some_steps(make):
            with contextlib.suppress(KeyboardInterrupt), at_step(number, interrupt):
                make()
            assert_empty(caller)


# -- a request that waits for a value ----------------------------------------------------------


def test_calls_that_have_timed_out_are_not_kept_until_the_value_comes(mesh: Mesh) -> None:
    """A program may ask again and again whether a function that runs for days has returned."""
    with mesh.agent(0).as_current(), Gate() as gate:
        rref = zrpc.remote("worker1", gate.wait_inside, args=(1,))
        gate.await_entry()
        callee = mesh.agent(1).callee
        patient = rref.rpc_async(timeout=0).bit_length()
        until(lambda: len(callee.requests.all()) == 2, "it waits for the value")
        for _ in range(500):
            call = rref.rpc_async(timeout=0).bit_length()
            assert call.cancel()
        until(lambda: len(callee.requests.all()) == 2, "the others are dropped")
        assert len(living(Message)) < 250
        gate.open()
        assert patient.wait() == 1
    del rref, patient, call
    rest(mesh)
    assert_empty(mesh)

"""Orders of events that are rare: each test makes one of them happen."""

from __future__ import annotations

import contextlib
import errno
from typing import Any

import pytest
import torch

import zrpc
from tests.services.rref.tracked import (
    Value,
    assert_empty,
    assert_kept,
    is_freed,
    rest,
)
from tests.support.gates import Gate
from tests.support.io_threads import io_thread_held
from tests.support.observed import living
from tests.support.steps import at_step, interrupt, some_steps
from tests.support.waiting import until
from zrpc.services.shm.service import SharedMemoryService
from zrpc.testing import Mesh
from zrpc.wire.kind import Kind
from zrpc.wire.message import Message


class Held:
    """Messages of one kind that a worker has sent, and that are still under way.

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
        self._network.send = self._send  # type: ignore[method-assign]
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
@pytest.mark.parametrize(
    "make",
    [
        lambda: zrpc.RRef(Value("own")),
        lambda: zrpc.remote("worker0", Value, args=("own",)),
        lambda: zrpc.remote("worker1", Value, args=("own",)),
    ],
    ids=["own", "made here", "made there"],
)
def test_ctrl_c_leaves_nothing_of_an_rref(mesh: Mesh, make: Any) -> None:
    with mesh.agent(0).as_current():
        for number in some_steps(make):
            with contextlib.suppress(KeyboardInterrupt), at_step(number, interrupt):
                make()
            assert_empty(mesh)


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

"""Orders of events that are rare: each test makes one of them happen."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import zrpc
import zrpc.autograd as dist_autograd
from tests.services.autograd.split_models import (
    SOON,
    Held,
    X,
    assert_freed,
    call,
    layer,
    layers,
    settle,
)
from tests.support.identity import here
from tests.support.waiting import until
from zrpc.membership.failure_detector import Reason
from zrpc.testing import Mesh
from zrpc.wire.kind import Kind

pytestmark = pytest.mark.zrpc(workers=3, timeout=30)

# A part that hangs ends with its context: nothing may need that.
_IN_TIME = 3.0


def at_once(mesh: Mesh, fn: Callable[[], Any]) -> Any:
    """Runs a function at worker0; it may not wait for what never comes."""
    outcome: list[Any] = []

    def run() -> None:
        with mesh.agent(0).as_current():
            try:
                outcome.append(fn())
            except Exception as error:
                outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_IN_TIME)
    assert not thread.is_alive(), "it hangs"
    return outcome[0]


def until_no_part_runs(mesh: Mesh) -> None:
    for rank in range(len(mesh)):
        requests = mesh.agent(rank).callee.requests
        until(lambda r=requests: not r.all(), f"worker{rank} does nothing", within=_IN_TIME)


# -- the end of a context ----------------------------------------------------------------------


class SlowSet(set[Any]):
    """The workers of a context, to which one is added slowly."""

    def __init__(self, peer: int, given: Any) -> None:
        super().__init__(given)
        self._peer = peer
        self.adding, self.go = threading.Event(), threading.Event()

    def add(self, peer: Any) -> None:
        if peer == self._peer:
            self.adding.set()
            assert self.go.wait(SOON)
        super().add(peer)


def test_a_context_ends_as_a_handler_brings_another_worker_in(mesh: Mesh) -> None:
    """The end must go to that worker, too."""
    contexts = layers(mesh)[1].contexts
    begin, begun, ending = threading.Event(), threading.Event(), threading.Event()
    release = contexts.release

    def note_end(*args: Any, **more: Any) -> None:
        ending.set()
        release(*args, **more)

    contexts.release = note_end  # type: ignore[method-assign]

    def bring_in(x: Any) -> Any:
        begun.set()
        assert begin.wait(SOON)
        return call("worker2", layer, 2, x).detach()

    with mesh.agent(0).as_current():
        with dist_autograd.context() as context_id:
            future = zrpc.rpc_async("worker1", here(bring_in), (X,))
            assert begun.wait(SOON)
            state = contexts.find(context_id)
            state.peers = peers = SlowSet(2, state.peers)
            begin.set()
            assert peers.adding.wait(SOON)
        assert ending.wait(SOON)
        peers.go.set()
        future.wait()
    settle(mesh)
    assert_freed(mesh)


class SlowDict(dict[Any, Any]):
    """The messages that a worker has sent, to which one is added slowly."""

    def __init__(self) -> None:
        super().__init__()
        self.adding, self.go = threading.Event(), threading.Event()

    def __setitem__(self, key: Any, value: Any) -> None:
        self.adding.set()
        assert self.go.wait(SOON)
        super().__setitem__(key, value)


def test_a_context_ends_as_an_answer_is_packed(mesh: Mesh) -> None:
    """The caller still waits for the answer, and gets it."""
    sends = SlowDict()

    def there(x: Any) -> Any:
        contexts = layers(mesh)[1].contexts
        contexts.find(contexts.current()).sends = sends
        return layer(1, x)

    with mesh.agent(0).as_current():
        with dist_autograd.context():
            future = zrpc.rpc_async("worker1", here(there), (X,))
            assert sends.adding.wait(SOON)
        until(lambda: not len(layers(mesh)[1]), "worker1 has no context")
        sends.go.set()
        assert torch.equal(future.wait().detach(), layer(1, X).detach())
    assert_freed(mesh)


def test_the_end_of_a_context_is_lost(mesh: Mesh) -> None:
    """With a connection that breaks; it is asked for when that is noticed."""
    agent, lost = mesh.agent(1), Held(mesh, Kind.RELEASE, 0, 1)
    with mesh.agent(0).as_current(), dist_autograd.context():
        call("worker1", call, "worker2", max, 1, 2)
    assert lost.any.is_set()
    lost.release(send=False)
    agent.receiver.in_io_thread(lambda: agent.dispatcher.count_missing(0, 0, 0))
    for rank in (1, 2):
        until(lambda r=rank: not len(layers(mesh)[r]), f"worker{rank} is told", within=_IN_TIME)


# -- what is known before a part begins ----------------------------------------------------------


def through_worker2(x: Any) -> Any:
    return layer(1, call("worker2", layer, 2, layer(1, x)))


def lose_each_other(mesh: Mesh, one: int, other: int) -> None:
    """Has two workers lose each other, as if the network between them were cut."""
    for this, lost in ((one, other), (other, one)):
        agent, member = mesh.agent(this), mesh.agent(lost).worker_info.member_id
        agent.receiver.in_io_thread(lambda a=agent, m=member: a.peers.remove(m, Reason.SILENT))
        until(lambda a=agent, m=member: m in a.membership.lost)
        done = threading.Event()
        agent.receiver.in_io_thread(done.set)
        assert done.wait(SOON)


def test_two_workers_lose_each_other_before_a_pass(mesh: Mesh) -> None:
    """The worker that begins still has both."""

    def run() -> Any:
        with dist_autograd.context() as context_id:
            loss = call("worker1", through_worker2, X).sum()
            lose_each_other(mesh, 1, 2)
            dist_autograd.backward(context_id, [loss])

    error = at_once(mesh, run)
    assert isinstance(error, RuntimeError)
    assert "silent" in str(error) or "no longer answers" in str(error)
    assert_freed(mesh)


KEPT: dict[str, Any] = {}


def push(x: Any) -> None:
    call("worker2", store, layer(1, x))


def store(x: Any) -> None:
    KEPT["x"] = layer(2, x)


def fetch() -> Any:
    return KEPT.pop("x")


def test_a_gradient_is_lost_before_the_part_of_its_receiver_begins(mesh: Mesh) -> None:
    agent, known = mesh.agent(1), threading.Event()
    lost, part = Held(mesh, Kind.GRADIENT, 2, 1), Held(mesh, Kind.BACKWARD, 0, 1)

    def lose() -> None:
        assert lost.any.wait(SOON)
        assert part.any.wait(SOON)
        agent.receiver.in_io_thread(lambda: (agent.dispatcher.count_missing(2, 0, 0), known.set()))
        assert known.wait(SOON)
        lost.release(send=False)
        part.release()

    loser = threading.Thread(target=lose)
    loser.start()

    def run() -> Any:
        with dist_autograd.context() as context_id:
            call("worker1", push, X)
            loss = call("worker2", fetch).sum()
            dist_autograd.backward(context_id, [loss])

    error = at_once(mesh, run)
    assert isinstance(error, RuntimeError)
    assert "were lost" in str(error)
    loser.join(SOON)
    assert_freed(mesh)


# -- the end of a pass that has failed -------------------------------------------------------------


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> None:
        raise ValueError("broken on purpose")


def down(rank: int, last: int, x: Any) -> Any:
    if rank == last:
        return Broken.apply(x * 2)
    return call(f"worker{rank + 1}", down, rank + 1, last, x * 2) * 2


@pytest.mark.zrpc(workers=4, timeout=30)
def test_a_pass_that_failed_ends_at_all_workers(mesh: Mesh) -> None:
    """Also at those that exchange nothing with the one where it failed; the context goes on."""
    with mesh.agent(0).as_current(), dist_autograd.context() as context_id:
        loss = call("worker1", down, 1, 3, X).sum()
        with pytest.raises(RuntimeError, match="broken on purpose"):
            dist_autograd.backward(context_id, [loss])
        until_no_part_runs(mesh)
    assert_freed(mesh)


def test_a_pass_that_is_interrupted_ends_at_all_workers(mesh: Mesh) -> None:
    """By Ctrl-C, where it has begun; the context goes on."""

    class Interrupted(BaseException):
        pass

    def interrupt(_: Any) -> None:
        raise Interrupted

    with mesh.agent(0).as_current(), dist_autograd.context() as context_id:
        x = X * 2
        x.register_hook(interrupt)
        # worker1 waits for the gradient of what it has sent last, and worker0 does not come to it.
        far = call("worker1", layer, 1, X * 3)
        y = call("worker1", layer, 1, far * 2)
        loss = y.sum() + call("worker2", layer, 2, x).sum()
        far.register_hook(interrupt)
        with pytest.raises(Interrupted):
            dist_autograd.backward(context_id, [loss])
        until_no_part_runs(mesh)
    assert_freed(mesh)


def test_a_hook_at_another_worker_that_exits(mesh: Mesh) -> None:
    def exit_hook(_: Any) -> None:
        raise SystemExit(3)

    def there(x: Any) -> Any:
        y = layer(1, x)
        y.register_hook(exit_hook)
        return y

    def run() -> Any:
        with dist_autograd.context() as context_id:
            loss = call("worker1", there, X).sum()
            dist_autograd.backward(context_id, [loss])

    error = at_once(mesh, run)
    assert isinstance(error, RuntimeError)
    assert "Error on Node 1" in str(error)
    until_no_part_runs(mesh)
    assert_freed(mesh)

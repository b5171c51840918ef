"""Workers that die during a pass or before it, or lose each other, and messages that are lost."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import zrpc
import zrpc.autograd as dist_autograd
from tests.services.autograd.split_models import (
    Held,
    X,
    assert_freed,
    call,
    gradients_at,
    layer,
    layers,
    posted,
    residual,
    settle,
    step,
    train,
)
from tests.support.observed import ask_often
from tests.support.parting import leaving_at_once, lose_each_other
from tests.support.waiting import SOON, until
from zrpc.agent.current import current_agent
from zrpc.services.autograd.service import AutogradService
from zrpc.testing import Mesh, faults
from zrpc.wire.kind import Kind

pytestmark = pytest.mark.zrpc(workers=3, timeout=30)

# A part that hangs ends with its context: nothing may need that.
_IN_TIME = 3.0


# Workers that are killed. They are processes, so what follows runs there.


PROCESSES = pytest.mark.zrpc(workers=3, processes=True, timeout=60)


def held(x: Any, mark: str) -> Any:
    def hold(_: Any) -> None:
        open(mark, "w").close()
        threading.Event().wait(60)

    y = x * 2
    y.register_hook(hold)
    return y


def sine_at(x: Any, to: Any) -> Any:
    return zrpc.rpc_sync(to, torch.sin, (x,))


def contexts() -> int:
    return len(current_agent().service(AutogradService))


def assert_works_without(mesh: Mesh, rank: int) -> None:
    """The two others have no context; and a new one works."""
    one, other = {0, 1, 2} - {rank}
    for each in (one, other):
        until(lambda each=each: mesh.run(each, contexts) == 0, f"worker{each} has no context")
    torch.testing.assert_close(mesh.run(one, gradient_over, other), torch.ones(3).cos())


def gradient_over(to: Any) -> Any:
    with dist_autograd.context() as context_id:
        x = torch.ones(3, requires_grad=True)
        dist_autograd.backward(context_id, [sine_at(x, to).sum()])
        return dist_autograd.get_gradients(context_id)[x]


def backward_of_held(mark: str, relay: str | None) -> None:
    with dist_autograd.context() as context_id:
        x = torch.ones(3, requires_grad=True)
        if relay is not None:
            x = zrpc.rpc_sync(relay, sine_at, (x, "worker2"))
        dist_autograd.backward(context_id, [zrpc.rpc_sync("worker2", held, (x, mark)).sum()])


@PROCESSES
@pytest.mark.parametrize("relay", [None, "worker1"])
def test_a_worker_that_is_killed_during_a_pass(mesh: Mesh, tmp_path: Path, relay: Any) -> None:
    mark = tmp_path / "held"
    future = mesh.submit(0, backward_of_held, str(mark), relay)
    until(mark.exists, "worker2 runs its part")
    mesh.kill("worker2")
    with pytest.raises(RuntimeError, match=r"worker2.*died|worker2.*gone"):
        future.result(SOON)
    assert_works_without(mesh, 2)


# Workers that leave, or lose each other.


def test_a_worker_that_was_lost_before_the_pass(caller: Mesh) -> None:
    with dist_autograd.context() as context_id:
        used, of_lost = (call(f"worker{rank}", layer, rank, X).sum() for rank in (1, 2))
        caller.agent(2).close()
        until(lambda: 2 in caller.agent(0).membership.lost)
        dist_autograd.backward(context_id, [used])  # does not need it
        with pytest.raises(zrpc.WorkerDied, match="worker2"):
            dist_autograd.backward(context_id, [of_lost])
    until(lambda: not any(map(len, layers(caller)[:2])), "the two others have no context")


@pytest.mark.parametrize("ends_first", [False, True])
def test_a_context_that_went_on_by_a_worker_that_is_gone(mesh: Mesh, ends_first: bool) -> None:
    """worker0 knows nothing of worker2, and the one who could tell has left the mesh."""
    *_, far = layers(mesh)
    is_told, go = threading.Event(), threading.Event()

    def run() -> None:
        with dist_autograd.context():
            call("worker1", call, "worker2", torch.sin, X)
            assert len(far) == 1
            is_told.set()
            assert go.wait(SOON)

    running = mesh.submit(0, run)
    assert is_told.wait(SOON)
    if ends_first:  # its end comes to worker1, and not from there to worker2
        ends = Held(mesh, Kind.RELEASE, 1, 2)
        go.set()
        running.result(SOON)
        assert ends.any.wait(SOON)
        ends.release(send=False)
    with posted(mesh) as counts:
        mesh.run(1, zrpc.shutdown, graceful=False)
        until(lambda: 1 in mesh.agent(2).membership.lost)
        until(lambda: counts[Kind.ENLIST] == 1)
        if not ends_first:
            for rank, to in ((0, 2), (2, 0)) * 3:
                with mesh.agent(rank).as_current():
                    assert zrpc.rpc_sync(to, max, (1, 2)) == 2
            assert len(far) == 1  # worker0 is not done with it
            go.set()
            running.result(SOON)
        until(lambda: len(far) == 0, "the context is freed at worker2")


def through_worker2(x: Any) -> Any:
    return layer(1, call("worker2", layer, 2, layer(1, x)))


def test_two_workers_lose_each_other_before_a_pass(mesh: Mesh) -> None:
    """The worker that begins still has both."""

    def model() -> Any:
        loss = call("worker1", through_worker2, X).sum()
        lose_each_other(mesh, 1, 2)
        return loss

    with leaving_at_once(mesh):
        with pytest.raises(RuntimeError, match=r"silent|no longer answers"):
            mesh.submit(0, step, mesh, model).result(_IN_TIME)
        assert_freed(mesh)


# Without heartbeats, nobody decides which of two must go that have lost each other.
UNDECIDED = pytest.mark.zrpc(workers=3, timeout=30, options={"heartbeat_timeout": 0})


@UNDECIDED
def test_a_worker_loses_the_creator_of_a_context_during_a_call(mesh: Mesh) -> None:
    """A worker between the two still reaches both: it is told why no gradient can be sent."""

    def last(x: Any) -> Any:
        lose_each_other(mesh, 0, 2)
        return layer(2, x)

    def model() -> Any:
        return call("worker1", lambda x: call("worker2", last, x), X).sum()

    with leaving_at_once(mesh):
        with pytest.raises(zrpc.WorkerDied, match=r"worker0 \(rank 0\) is gone: it no longer"):
            mesh.submit(0, step, mesh, model).result(_IN_TIME)
        assert_freed(mesh)


@UNDECIDED
def test_a_context_is_asked_for_where_its_creator_is_lost(mesh: Mesh) -> None:
    """A late message of it, by a worker that still reaches both, begins nothing that stays."""

    def run() -> None:
        with dist_autograd.context() as context_id:
            lose_each_other(mesh, 0, 2)
            call("worker1", call, "worker2", layer, 2, X)
            assert not gradients_at(mesh, 2, context_id)
            with (
                mesh.agent(2).as_current(),
                pytest.raises(zrpc.WorkerDied, match="has lost its creator"),
            ):
                dist_autograd.get_gradients(context_id)

    with leaving_at_once(mesh):
        mesh.submit(0, run).result(_IN_TIME)
        assert_freed(mesh)


# Messages that are lost.


@pytest.mark.system
@pytest.mark.zrpc(workers=3, timeout=30, faults=True)
@pytest.mark.parametrize("way", list(itertools.permutations(range(3), 2)))
def test_a_message_is_lost(mesh: Mesh, way: tuple[int, int]) -> None:
    """With a connection that breaks; the pass must not wait for it."""
    ask_often(mesh)
    settle(mesh)  # so that all are connected
    with mesh.agent(0).as_current(), dist_autograd.context() as context_id:
        loss = (call("worker1", through_worker2, X) + call("worker2", layer, 2, X)).sum()
        with faults.drop(mesh, *way) as fault:
            with pytest.raises(RuntimeError, match=r"lost: a connection broke|is lost"):
                dist_autograd.backward(context_id, [loss])
            assert fault.happened
    assert_freed(mesh)
    train(mesh, residual)


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

    def model() -> Any:
        call("worker1", push, X)
        return call("worker2", fetch).sum()

    future = mesh.submit(0, step, mesh, model)
    assert lost.any.wait(SOON)
    assert part.any.wait(SOON)
    agent.receiver.in_io_thread(lambda: (agent.dispatcher.count_missing(2, 0, 0), known.set()))
    assert known.wait(SOON)
    lost.release(send=False)
    part.release()
    with pytest.raises(RuntimeError, match="were lost"):
        future.result(_IN_TIME)
    assert_freed(mesh)


# The message that ends a context.


def test_the_end_of_a_context_is_lost(mesh: Mesh) -> None:
    """With a connection that breaks; it is asked for when that is noticed."""
    agent, lost = mesh.agent(1), Held(mesh, Kind.RELEASE, 0, 1)
    with mesh.agent(0).as_current(), dist_autograd.context():
        call("worker1", call, "worker2", max, 1, 2)
    assert lost.any.is_set()
    lost.release(send=False)
    agent.receiver.in_io_thread(lambda: agent.dispatcher.count_missing(0, 0, 0))
    for service in layers(mesh)[1:]:
        until(lambda s=service: not len(s), "a worker is told", within=3.0)

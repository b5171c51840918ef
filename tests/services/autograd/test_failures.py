"""A pass that fails, in orders of events that are rare too, is an error for who asked for it."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch

import zrpc
import zrpc.autograd as dist_autograd
from tests.services.autograd.split_models import (
    LEAVES,
    SOON,
    Held,
    W,
    X,
    assert_as_local,
    assert_freed,
    call,
    gradients_at,
    layer,
    local_gradients,
    settle,
    train,
)
from tests.support.identity import here
from tests.support.parting import leaving_at_once, lose_each_other
from tests.support.waiting import until
from zrpc.services.inspection.service import InspectionService
from zrpc.testing import Mesh, faults
from zrpc.wire.kind import Kind

pytestmark = pytest.mark.zrpc(workers=3, timeout=30)


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> None:
        raise ValueError("broken on purpose")


def waiting_backward(begun: Any, go: Any) -> Any:
    """A function that changes nothing, and whose backward pass waits for ``go``."""

    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            begun.set()
            assert go.wait(SOON)
            return gradient

    return Waits.apply


def chain(rank: Any, broken: Any, x: Any) -> Any:
    """Through the workers in order, and back."""
    x = layer(rank, x)
    if rank == broken:
        x = Broken.apply(x)
    if rank < 2:
        x = x + call(f"worker{rank + 1}", chain, rank + 1, broken, x)
    return x * 2


@pytest.mark.system
@pytest.mark.zrpc(faults=True)
@pytest.mark.parametrize("way", list(itertools.permutations(range(3), 2)))
def test_a_message_is_lost(mesh: Mesh, way: tuple[int, int]) -> None:
    """With a connection that breaks; the pass must not wait for it."""
    for rank in range(3):
        mesh.agent(rank).service(InspectionService).rules.seconds = 0.05
    settle(mesh)  # so that all are connected
    with mesh.agent(0).as_current(), dist_autograd.context() as context_id:
        loss = chain(0, None, X).sum()
        with faults.drop(mesh, *way) as fault:
            with pytest.raises(RuntimeError, match=r"lost: a connection broke|is lost"):
                dist_autograd.backward(context_id, [loss])
            assert fault.happened
    assert_usable(mesh)


def assert_usable(mesh: Mesh) -> None:
    assert_freed(mesh)
    assert_as_local(mesh, lambda: chain(0, None, X).sum(), LEAVES)


@pytest.mark.parametrize("rank", [1, 2])
def test_a_backward_that_raises_at_another_worker(mesh: Mesh, rank: int) -> None:
    with pytest.raises(RuntimeError, match=f"(?s)Error on Node {rank}: .*broken on purpose"):
        train(mesh, lambda: chain(0, rank, X).sum())
    assert_usable(mesh)


def test_a_backward_that_raises_at_the_caller(mesh: Mesh) -> None:
    with pytest.raises(ValueError, match="broken on purpose"):
        train(mesh, lambda: chain(0, 0, X).sum())
    assert_usable(mesh)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_hook_that_raises(mesh: Mesh, rank: int) -> None:
    def fail(gradient: Any) -> None:
        raise ValueError("hook on purpose")

    raises = pytest.raises((RuntimeError, ValueError), match="hook on purpose")
    with W[rank].register_hook(fail), raises as raised:
        train(mesh, lambda: chain(0, None, X).sum())
    assert (f"Error on Node {rank}" in str(raised.value)) == (rank != 0)
    assert_usable(mesh)


def test_a_failure_leaves_other_contexts_alone(mesh: Mesh) -> None:
    """One pass fails while another one is under way, at the same workers."""
    under_way, go = threading.Event(), threading.Event()

    wait = waiting_backward(under_way, go)

    def good() -> None:
        with mesh.agent(0).as_current(), dist_autograd.context() as context_id:
            loss = chain(0, None, call("worker1", lambda x: wait(x), X)).sum()
            dist_autograd.backward(context_id, [loss])
            found.append(gradients_at(mesh, 2, context_id)[W[2]])

    found = []
    thread = threading.Thread(target=good)
    thread.start()
    assert under_way.wait(SOON)
    with pytest.raises(RuntimeError, match="Error on Node 2"):
        mesh.run(0, lambda: _fail_once())
    go.set()
    thread.join(SOON)
    [expected] = local_gradients(lambda: chain(0, None, X).sum(), [W[2]])
    torch.testing.assert_close(found, [expected])
    assert_usable(mesh)


def _fail_once() -> None:
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [chain(0, 2, X).sum()])


def test_a_pass_after_one_that_failed_in_the_same_context(caller: Mesh) -> None:
    with dist_autograd.context() as context_id:
        bad = call("worker1", chain, 1, 2, X).sum()
        with pytest.raises(RuntimeError, match="Error on Node 2"):
            dist_autograd.backward(context_id, [bad], retain_graph=True)
        with pytest.raises(RuntimeError, match="Error on Node 2"):
            dist_autograd.backward(context_id, [bad], retain_graph=True)
    assert_usable(caller)


@pytest.mark.system
def test_many_failures_leave_no_threads_behind(mesh: Mesh) -> None:
    """None that waits, and none beside the pools; these keep idle threads."""
    agents = [mesh.agent(name) for name in mesh]
    pools = [pool for agent in agents for pool in (agent.pool, agent.completions)]

    def others() -> set[str]:
        names = {thread.name for thread in threading.enumerate()}
        # On a slow machine a call waits so long that its callee is asked about it.
        kinds = "worker", "completion", "questions"
        pooled = tuple(f"zrpc-{name}-{kind}" for name in mesh for kind in kinds)
        return {name for name in names if not name.startswith(pooled)}

    def fail() -> None:
        with pytest.raises(RuntimeError, match="Error on Node"):
            mesh.run(0, _fail_once)
        assert_freed(mesh)

    fail()
    settle(mesh)
    before = others()
    for _ in range(30):
        fail()
    settle(mesh)
    until(lambda: not any(pool.active for pool in pools), "the jobs of failed passes have ended")
    assert others() == before
    assert_usable(mesh)


@pytest.mark.zrpc(workers=3, timeout=15)
def test_tensors_that_arrive_when_the_part_of_their_worker_has_begun(mesh: Mesh) -> None:
    """worker2 lists them as sent, and worker1 has them, but not in the chain that it runs."""
    arrived = threading.Event()
    held, part = Held(mesh, Kind.CALL, 2, 1), Held(mesh, Kind.BACKWARD, 0, 2)

    def relay_without_waiting(x: Any) -> Any:
        """At worker2: tensors go to worker1, and nobody waits for them."""
        x = layer(2, x)
        zrpc.rpc_async("worker1", here(lambda y: (layer(1, y), arrived.set())), (x,))
        return x

    def hook(gradient: Any) -> None:
        held.release()  # worker1 runs its chain
        assert arrived.wait(SOON)
        part.release()

    handle = W[1].register_hook(hook)

    def run() -> Any:
        with dist_autograd.context() as context_id:
            far = call("worker2", relay_without_waiting, X)
            loss = (call("worker1", layer, 1, X) + far).sum()
            dist_autograd.backward(context_id, [loss])
            return gradients_at(mesh, 0, context_id)[X]

    try:
        found = mesh.run(0, run)
    finally:
        handle.remove()
    [expected] = local_gradients(lambda: (layer(1, X) + layer(2, X)).sum(), [X])
    torch.testing.assert_close(found, expected)


@pytest.mark.zrpc(workers=3, timeout=15)
def test_a_worker_that_is_asked_after_the_pass_has_failed(caller: Mesh) -> None:
    """It neither runs its part, nor waits for gradients that will not come."""
    part = Held(caller, Kind.BACKWARD, 0, 2)

    def there(x: Any) -> Any:
        return Broken.apply(layer(1, call("worker2", layer, 2, x)))

    with dist_autograd.context() as context_id:
        loss = call("worker1", there, X).sum()
        with pytest.raises(RuntimeError, match=r"(?s)Error on Node 1: .*broken on purpose"):
            dist_autograd.backward(context_id, [loss])
        assert part.any.is_set()
        part.release()
    assert_usable(caller)


@pytest.mark.zrpc(workers=3, timeout=15)
def test_a_context_that_ends_during_a_pass(caller: Mesh) -> None:
    """The pass of another thread fails, and leaves no thread behind that waits."""
    waits, go = threading.Event(), threading.Event()

    wait = waiting_backward(waits, go)

    outcome = []

    def pass_of(context_id: Any, loss: Any) -> None:
        with caller.agent(0).as_current():
            try:
                dist_autograd.backward(context_id, [loss])
            except Exception as error:
                outcome.append(error)
            else:
                outcome.append(None)

    with dist_autograd.context() as context_id:
        loss = call("worker1", lambda x: wait(x), X.sin()).sum()
        thread = threading.Thread(target=pass_of, args=(context_id, loss))
        thread.start()
        assert waits.wait(SOON)
    assert_freed(caller)
    go.set()
    thread.join(SOON / 4)
    assert not thread.is_alive()
    assert len(outcome) == 1
    assert_usable(caller)


# A part that hangs ends with its context: nothing may need that.
_IN_TIME = 3.0


def until_no_part_runs(mesh: Mesh) -> None:
    for rank in range(len(mesh)):
        requests = mesh.agent(rank).callee.requests
        until(lambda r=requests: not r.all(), f"worker{rank} does nothing", within=_IN_TIME)


def through_worker2(x: Any) -> Any:
    return layer(1, call("worker2", layer, 2, layer(1, x)))


def test_two_workers_lose_each_other_before_a_pass(mesh: Mesh) -> None:
    """The worker that begins still has both."""

    def run() -> Any:
        with dist_autograd.context() as context_id:
            loss = call("worker1", through_worker2, X).sum()
            lose_each_other(mesh, 1, 2)
            dist_autograd.backward(context_id, [loss])

    with pytest.raises(RuntimeError, match=r"silent|no longer answers"):
        mesh.submit(0, run).result(_IN_TIME)
    assert_freed(mesh)


# Without heartbeats, nobody decides which of two must go that have lost each other.
UNDECIDED = pytest.mark.zrpc(workers=3, timeout=30, options={"heartbeat_timeout": 0})


@UNDECIDED
def test_a_worker_loses_the_creator_of_a_context_during_a_call(mesh: Mesh) -> None:
    """A worker between the two still reaches both: it is told why no gradient can be sent."""

    def last(x: Any) -> Any:
        lose_each_other(mesh, 0, 2)
        return layer(2, x)

    def middle(x: Any) -> Any:
        return call("worker2", last, x)

    def run() -> Any:
        with dist_autograd.context() as context_id:
            loss = call("worker1", middle, X).sum()
            dist_autograd.backward(context_id, [loss])

    with leaving_at_once(mesh):
        with pytest.raises(zrpc.WorkerDied, match=r"worker0 \(rank 0\) is gone: it no longer"):
            mesh.submit(0, run).result(_IN_TIME)
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

    with pytest.raises(RuntimeError, match="were lost"):
        mesh.submit(0, run).result(_IN_TIME)
    loser.join(SOON)
    assert_freed(mesh)


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

    with pytest.raises(RuntimeError, match="Error on Node 1"):
        mesh.submit(0, run).result(_IN_TIME)
    until_no_part_runs(mesh)
    assert_freed(mesh)

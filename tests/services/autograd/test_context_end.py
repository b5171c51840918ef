"""The end of contexts frees what they held, at all workers."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from typing import Any

import pytest
import torch

import zrpc
import zrpc.autograd as dist_autograd
from tests.services.autograd.split_models import (
    SOON,
    Held,
    W,
    X,
    assert_freed,
    call,
    gradients_at,
    layer,
    layers,
    settle,
    train,
)
from tests.support.identity import here
from tests.support.steps import at_step, interrupt, some_steps
from tests.support.waiting import until
from zrpc.services.autograd.state import ContextState
from zrpc.testing import Mesh, faults
from zrpc.wire.kind import Kind

pytestmark = pytest.mark.zrpc(workers=3, timeout=60)


def test_the_end_frees_all_workers(caller: Mesh) -> None:
    def chain(rank: Any, x: Any) -> Any:
        x = layer(rank, x)
        return call(f"worker{rank + 1}", chain, rank + 1, x) if rank < 2 else x

    with dist_autograd.context() as context_id:
        loss = call("worker1", chain, 1, X).sum()
        assert [len(layer) for layer in layers(caller)] == [1, 1, 1]
        dist_autograd.backward(context_id, [loss])
        assert [len(layer) for layer in layers(caller)] == [1, 1, 1]
    assert len(layers(caller)[0]) == 0
    assert_freed(caller)


def test_the_end_frees_workers_that_only_others_know(caller: Mesh) -> None:
    """Calls without tensors take a worker part too."""
    with dist_autograd.context():
        call("worker1", call, "worker2", call, "worker1", max, 1, 2)
        until(lambda: [len(layer) for layer in layers(caller)] == [1, 1, 1])
    assert_freed(caller)


def test_what_a_context_held_is_freed(mesh: Mesh) -> None:
    """Activations at all workers, gradients, and messages that nobody asked for."""
    watched = []

    def watch(tensor: Any) -> Any:
        watched.append(weakref.ref(tensor))
        return tensor

    def there(x: Any) -> Any:
        return watch(watch(x) * watch(W[1] * 2)[0])

    def run() -> Any:
        with dist_autograd.context() as context_id:
            far = watch(call("worker1", there, watch(X * 2)))
            call("worker1", there, watch(X * 3))
            dist_autograd.backward(context_id, [far.sum()], retain_graph=True)
            for rank in range(2):
                for gradient in gradients_at(mesh, rank, context_id).values():
                    watch(gradient)
            del gradient, far
            return len(watched)

    assert mesh.run(0, run) > 8
    assert_freed(mesh)
    gc.collect()
    until(lambda: not any(ref() is not None for ref in watched), "all tensors are freed")


@pytest.mark.system
def test_ctrl_c_keeps_no_worker_from_learning_that_a_context_has_ended(mesh: Mesh) -> None:
    def begin_and_end() -> None:
        with dist_autograd.context():
            for name in ("worker1", "worker2"):
                call(name, max, 1, 2)

    with mesh.agent(0).as_current():
        for number in some_steps(begin_and_end):
            with contextlib.suppress(KeyboardInterrupt), at_step(number, interrupt):
                begin_and_end()
            assert_freed(mesh)


def objects() -> Any:
    """How many there are of what contexts consist of."""
    gc.collect()
    kinds = (ContextState, torch.Tensor, threading.Thread)
    found = [type(o) for o in gc.get_objects()]  # isinstance would ask what pretends to be another
    return {kind.__name__: sum(issubclass(k, kind) for k in found) for kind in kinds}


@pytest.mark.system
@pytest.mark.zrpc(workers=3, timeout=180)
def test_many_contexts_leave_nothing(mesh: Mesh) -> None:
    def once() -> None:
        with dist_autograd.context() as context_id:
            far = call("worker1", layer, 1, X)
            loss = (call("worker2", layer, 2, far) + far).sum()
            dist_autograd.backward(context_id, [loss])

    def many(count: Any) -> None:
        for _ in range(count):
            once()

    mesh.run(0, many, 20)
    assert_freed(mesh)
    settle(mesh)
    before = objects()
    mesh.run(0, many, 400)
    assert_freed(mesh)
    settle(mesh)
    after = objects()
    assert after["ContextState"] == 0
    assert after["Tensor"] <= before["Tensor"] + 8  # one for each fifty contexts
    assert after["Thread"] <= before["Thread"] + 8


def test_a_call_that_arrives_after_the_end_does_not_revive_the_context(caller: Mesh) -> None:
    """It is held up on its way."""
    agent = caller.agent(1)
    go, held, ran = threading.Event(), threading.Event(), threading.Event()
    seen = []

    def late(x: Any) -> None:
        seen.append(x.requires_grad)
        call("worker2", layer, 2, x)
        ran.set()

    with dist_autograd.context():
        call("worker1", layer, 1, X)
        agent.receiver.in_io_thread(lambda: (held.set(), go.wait(SOON)))
        assert held.wait(SOON)
        future = zrpc.rpc_async("worker1", here(late), (X,))
    until(lambda: len(layers(caller)[0]) == 0)
    go.set()
    assert ran.wait(SOON)
    future.wait()
    settle(caller)
    assert_freed(caller)
    assert seen == [True]


def test_a_handler_that_outlives_its_context_does_not_revive_it(caller: Mesh) -> None:
    go, running, done = threading.Event(), threading.Event(), threading.Event()

    def slow(x: Any) -> Any:
        running.set()
        assert go.wait(SOON)
        call("worker2", layer, 2, x)
        call("worker0", layer, 0, x)
        done.set()
        return x * 2

    with dist_autograd.context():
        future = zrpc.rpc_async("worker1", here(slow), (X,))
        assert running.wait(SOON)
    assert_freed(caller)
    go.set()
    assert done.wait(SOON)
    assert torch.equal(future.wait().detach(), X.detach() * 2)
    settle(caller)
    assert_freed(caller)


def test_a_failed_pass_is_freed_too(mesh: Mesh) -> None:
    handle = W[1].register_hook(lambda g: 1 / 0)
    watched = []

    def there(x: Any) -> Any:
        y = layer(1, x)
        watched.append(weakref.ref(y))
        return y

    try:
        with pytest.raises(RuntimeError, match="Error on Node 1"):
            train(mesh, lambda: call("worker1", there, X * 2).sum())
    finally:
        handle.remove()
    assert_freed(mesh)
    settle(mesh)
    until(lambda: not any(ref() is not None for ref in watched), "all tensors are freed")


@pytest.mark.system
@pytest.mark.zrpc(workers=3, timeout=60, faults=True, options={"heartbeat_timeout": 1.0})
def test_a_context_goes_on_if_one_of_its_workers_has_lost_its_creator(caller: Mesh) -> None:
    """The others still reach the creator. The end of the context frees them, as always."""
    with dist_autograd.context() as context_id:
        call("worker1", call, "worker2", max, 1, 2)
        loss = call("worker2", layer, 2, X).sum()
        with faults.cut(caller, 0, 1):
            for this, lost in ((0, 1), (1, 0)):
                member = caller.agent(lost).worker_info.member_id
                lost_here = caller.agent(this).membership.lost
                until(lambda lost_here=lost_here, member=member: member in lost_here)
            # What worker1 says of that arrives before this, and what worker2 makes of it.
            caller.run(1, zrpc.rpc_sync, "worker2", max, (1, 2))
            call("worker2", max, 1, 2)
            dist_autograd.backward(context_id, [loss])
            found = gradients_at(caller, 2, context_id)[W[2]]
    torch.testing.assert_close(found, torch.autograd.grad(layer(2, X).sum(), [W[2]])[0])
    assert_freed(caller)


# A part that hangs ends with its context: nothing may need that.
_IN_TIME = 3.0


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

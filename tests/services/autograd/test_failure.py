"""A pass that fails is an error for the one who asked for it, and nobody else."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import zrpc
import zrpc.autograd as dist_autograd
from tests.services.autograd.split_models import (
    LEAVES,
    SOON,
    W,
    X,
    assert_as_local,
    assert_freed,
    call,
    gradients_at,
    layer,
    layers,
    local_gradients,
    posted,
    settle,
    train,
)
from tests.support.identity import here
from tests.support.waiting import until
from zrpc.agent.current import current_agent
from zrpc.services.autograd.service import AutogradService
from zrpc.services.loss_detection import LossDetectionTiming, LossDetector
from zrpc.testing import Mesh
from zrpc.wire.kind import Kind

pytestmark = pytest.mark.zrpc(workers=3, timeout=15)


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


def lose_next(monkeypatch: pytest.MonkeyPatch, agent: Any, kind: Any) -> Any:
    """Has an agent's next message of a kind, of those that it sends from now on, be lost."""
    send, lost = agent.network.send, []

    def lose(rank: Any, first: Any, buffers: Any = (), counted: bool = True) -> None:
        if first[1] == kind and not lost:
            lost.append(rank)
            agent.network._mailboxes[rank].sent += counted
        else:
            send(rank, first, buffers, counted)

    monkeypatch.setattr(agent.network, "send", lose)
    return lost


@pytest.mark.parametrize(
    ("loser", "kind"),
    [
        (1, Kind.GRADIENT),
        (2, Kind.GRADIENT),
        (0, Kind.DEPENDENCIES),
        (0, Kind.BACKWARD),
        (1, Kind.RESULT),
        (2, Kind.RESULT),
    ],
)
def test_a_message_is_lost(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, loser: int, kind: Any
) -> None:
    """With a connection that breaks; the pass must not wait for it."""
    for rank in range(3):
        mesh.agent(rank).service(LossDetector).timing = LossDetectionTiming(0.05)
    settle(mesh)  # so that all are connected
    with mesh.agent(0).as_current(), dist_autograd.context() as context_id:
        loss = chain(0, None, X).sum()
        lost = lose_next(monkeypatch, mesh.agent(loser), kind)
        with pytest.raises(RuntimeError, match=r"lost: a connection broke|is lost"):
            dist_autograd.backward(context_id, [loss])
        assert lost
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


def test_failures_at_several_workers(mesh: Mesh) -> None:
    def there(rank: Any, x: Any) -> Any:
        return Broken.apply(layer(rank, x))

    def model() -> Any:
        return (call("worker1", there, 1, X) * call("worker2", there, 2, X)).sum()

    with pytest.raises(RuntimeError, match=r"(?s)Error on Node [12]: .*broken on purpose"):
        train(mesh, model)
    assert_usable(mesh)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_hook_that_raises(mesh: Mesh, rank: int) -> None:
    def fail(gradient: Any) -> None:
        raise ValueError("hook on purpose")

    handle = W[rank].register_hook(fail)
    try:
        with pytest.raises((RuntimeError, ValueError), match="hook on purpose") as raised:
            train(mesh, lambda: chain(0, None, X).sum())
    finally:
        handle.remove()
    assert (f"Error on Node {rank}" in str(raised.value)) == (rank != 0)
    assert_usable(mesh)


def test_a_failure_with_an_rref_as_root(mesh: Mesh) -> None:
    def run() -> None:
        with dist_autograd.context() as context_id:
            loss = zrpc.remote("worker1", here(lambda x: chain(1, 2, x).sum()), (X,))
            with pytest.raises(RuntimeError, match=r"(?s)Error on Node 2: .*broken on purpose"):
                loss.backward(context_id)

    mesh.run(0, run)
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


def test_a_pass_after_one_that_failed_in_the_same_context(mesh: Mesh) -> None:
    def run() -> None:
        with dist_autograd.context() as context_id:
            bad = call("worker1", chain, 1, 2, X).sum()
            with pytest.raises(RuntimeError, match="Error on Node 2"):
                dist_autograd.backward(context_id, [bad], retain_graph=True)
            with pytest.raises(RuntimeError, match="Error on Node 2"):
                dist_autograd.backward(context_id, [bad], retain_graph=True)

    mesh.run(0, run)
    assert_usable(mesh)


def test_many_failures_leave_no_threads_behind(mesh: Mesh) -> None:
    def threads() -> Any:
        return sum(t.name.startswith("zrpc-") for t in threading.enumerate())

    def fail() -> None:
        with pytest.raises(RuntimeError, match="Error on Node"):
            mesh.run(0, _fail_once)
        assert_freed(mesh)

    fail()
    settle(mesh)
    before = threads()
    for _ in range(30):
        fail()
    settle(mesh)
    until(lambda: threads() <= before + 6, "the threads of failed passes have ended")
    assert_usable(mesh)


# Calls within the context that went wrong hold nobody up.


def test_a_call_that_raised_after_it_took_tensors(mesh: Mesh) -> None:
    def fail(x: Any) -> None:
        layer(1, x)
        raise KeyError("on purpose")

    def model() -> Any:
        x = X.sin()
        if zrpc.agent.current.find_agent() is not None:
            with pytest.raises(KeyError):
                call("worker1", fail, x)
        return call("worker1", layer, 1, x).sum()

    assert_as_local(mesh, model, LEAVES)


def test_a_nested_call_that_raised(mesh: Mesh) -> None:
    def fail(x: Any) -> None:
        raise KeyError("on purpose")

    def relay(x: Any) -> Any:
        x = layer(1, x)
        if zrpc.agent.current.find_agent() is not None:
            with pytest.raises(KeyError):
                call("worker2", fail, x)
        return x

    assert_as_local(mesh, lambda: call("worker1", relay, X).sum(), LEAVES)


def test_a_result_that_cannot_be_pickled(mesh: Mesh) -> None:
    def there(x: Any) -> Any:
        return layer(1, x), threading.Lock()

    def model() -> Any:
        x = X.sin()
        if zrpc.agent.current.find_agent() is not None:
            with pytest.raises(RuntimeError, match="pickle"):
                call("worker1", there, x)
        return call("worker1", layer, 1, x).sum()

    assert_as_local(mesh, model, LEAVES)


def test_arguments_that_cannot_be_pickled(mesh: Mesh) -> None:
    def model() -> Any:
        x = X.sin()
        if zrpc.agent.current.find_agent() is not None:
            with pytest.raises(RuntimeError, match="pickle"):
                call("worker1", layer, threading.Lock(), x)
        return call("worker1", layer, 1, x).sum()

    assert_as_local(mesh, model, LEAVES)


class NotRebuilt:
    def __init__(self, x: Any) -> None:
        self.x = x

    def __setstate__(self, state: Any) -> None:
        raise ValueError("not rebuilt on purpose")


def test_arguments_that_cannot_be_rebuilt(mesh: Mesh) -> None:
    """The tensors have arrived when the rest is found to be broken."""

    def model() -> Any:
        x = X.sin()
        if zrpc.agent.current.find_agent() is not None:
            with pytest.raises(RuntimeError, match="not rebuilt on purpose"):
                call("worker1", layer, NotRebuilt(x), x)
        return call("worker1", layer, 1, x).sum()

    assert_as_local(mesh, model, LEAVES)


def test_a_result_that_cannot_be_rebuilt(mesh: Mesh) -> None:
    def there(x: Any) -> Any:
        return NotRebuilt(layer(1, x))

    def run() -> Any:
        with dist_autograd.context() as context_id:
            x = X.sin()
            for _ in range(2):
                future = zrpc.rpc_async("worker1", here(there), (x,))
                for _ in range(2):  # the same error each time
                    with pytest.raises(RuntimeError, match="not rebuilt on purpose"):
                        future.wait()
            dist_autograd.backward(context_id, [call("worker1", layer, 1, x).sum()])
            return gradients_at(mesh, 0, context_id)[X]

    [expected] = local_gradients(lambda: layer(1, X.sin()).sum(), [X])
    torch.testing.assert_close(mesh.run(0, run), expected)
    assert_freed(mesh)


@pytest.mark.parametrize("late", ["during", "before"])
def test_a_call_whose_timeout_passed(mesh: Mesh, late: str) -> None:
    """Its result comes before the pass, or while that runs, or never."""
    go, done = threading.Event(), threading.Event()

    def slow(x: Any) -> Any:
        y = layer(1, x)
        assert go.wait(SOON)
        try:
            return y
        finally:
            done.set()

    def wait(gradient: Any) -> None:
        if late == "during":
            go.set()
            assert done.wait(SOON)

    def run() -> Any:
        with dist_autograd.context() as context_id:
            x = X.sin()
            x.register_hook(wait)
            with pytest.raises(RuntimeError, match="RPC ran for more than set timeout"):
                zrpc.rpc_sync("worker1", here(slow), (x,), timeout=0.1)
            if late == "before":
                go.set()
                assert done.wait(SOON)
                settle_from(0)
            dist_autograd.backward(context_id, [call("worker1", layer, 1, x).sum()])
            return gradients_at(mesh, 0, context_id)[X], gradients_at(mesh, 1, context_id)[W[1]]

    def settle_from(rank: Any) -> None:
        for _ in range(3):
            zrpc.rpc_sync("worker1", max, (1, 2))

    try:
        found = mesh.run(0, run)
    finally:
        go.set()
    expected = local_gradients(lambda: layer(1, X.sin()).sum(), [X, W[1]])
    torch.testing.assert_close(list(found), expected)
    assert_freed(mesh)


def test_a_future_that_nobody_awaits(mesh: Mesh) -> None:
    def run() -> Any:
        with dist_autograd.context() as context_id:
            x = X.sin()
            zrpc.rpc_async("worker1", here(layer), (1, x))
            zrpc.remote("worker2", here(layer), (2, x))
            dist_autograd.backward(context_id, [call("worker1", layer, 1, x).sum()])
            return gradients_at(mesh, 0, context_id)[X]

    [expected] = local_gradients(lambda: layer(1, X.sin()).sum(), [X])
    for _ in range(20):
        torch.testing.assert_close(mesh.run(0, run), expected)
    assert_freed(mesh)


# What happens while a pass runs is not part of it. Each of these makes one certain order of
# events happen.


def relay_without_waiting(x: Any) -> Any:
    """At worker2: tensors go to worker1, and nobody waits for them."""
    x = layer(2, x)
    zrpc.rpc_async("worker1", layer, (1, x))
    return x


@pytest.mark.zrpc(workers=3, timeout=15)
def test_tensors_that_arrive_when_the_part_of_their_worker_has_begun(mesh: Mesh) -> None:
    """worker2 lists them as sent, and worker1 has them, but not in the chain that it runs."""
    first, second = (layer.passes for layer in layers(mesh)[1:])
    begun, arrived = threading.Event(), threading.Event()
    released = threading.Event()

    def hold_arrival(decoder: Any) -> None:
        message = decoder.message
        if message.sender == 2 and message.table and not released.is_set():
            assert begun.wait(SOON)

    def note_arrival(decoder: Any) -> None:
        if decoder.message.sender == 2 and decoder.message.table:
            arrived.set()

    agent = mesh.agent(1)
    [(tag, receive)] = agent.codec._openers.items()
    agent.codec._openers[tag] = lambda decoder: (
        hold_arrival(decoder),
        receive(decoder),
        note_arrival(decoder),
    )
    take_part = second._take_part

    def take_part_later(request: Any) -> None:
        assert arrived.wait(SOON)
        take_part(request)

    second._take_part = take_part_later

    def hook(gradient: Any) -> None:
        begun.set()  # worker1 runs its chain
        assert arrived.wait(SOON)

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
        released.set()
        begun.set()
    [expected] = local_gradients(lambda: (layer(1, X) + layer(2, X)).sum(), [X])
    torch.testing.assert_close(found, expected)
    assert first is not None


@pytest.mark.zrpc(workers=3, timeout=15)
def test_a_worker_that_is_asked_after_the_pass_has_failed(mesh: Mesh) -> None:
    """It neither runs its part, nor waits for gradients that will not come."""
    second = layers(mesh)[2].passes
    take_part, failed = second._take_part, threading.Event()

    def take_part_later(request: Any) -> None:
        assert failed.wait(SOON)
        take_part(request)

    second._take_part = take_part_later

    def there(x: Any) -> Any:
        return Broken.apply(layer(1, x))

    def run() -> None:
        with dist_autograd.context() as context_id:
            far = call("worker2", layer, 2, X)
            loss = call("worker1", there, far).sum()
            try:
                with pytest.raises(RuntimeError, match=r"(?s)Error on Node 1: .*broken on purpose"):
                    dist_autograd.backward(context_id, [loss])
            finally:
                failed.set()

    mesh.run(0, run)
    assert_usable(mesh)


@pytest.mark.zrpc(workers=3, timeout=15)
def test_a_context_that_ends_during_a_pass(mesh: Mesh) -> None:
    """The pass of another thread fails, and leaves no thread behind that waits."""
    waits, go = threading.Event(), threading.Event()

    wait = waiting_backward(waits, go)

    outcome = []

    def pass_of(context_id: Any, loss: Any) -> None:
        with mesh.agent(0).as_current():
            try:
                dist_autograd.backward(context_id, [loss])
            except Exception as error:
                outcome.append(error)
            else:
                outcome.append(None)

    def run() -> Any:
        with dist_autograd.context() as context_id:
            loss = call("worker1", lambda x: wait(x), X.sin()).sum()
            thread = threading.Thread(target=pass_of, args=(context_id, loss))
            thread.start()
            assert waits.wait(SOON)
        return thread

    thread = mesh.run(0, run)
    assert_freed(mesh)
    go.set()
    thread.join(SOON / 4)
    assert not thread.is_alive()
    assert len(outcome) == 1
    assert_usable(mesh)


# Workers that die.


def hold_forever(gradient: Any) -> None:
    open(os.environ["ZRPC_TEST_MARK"], "w").close()
    threading.Event().wait(60)


def held(x: Any) -> Any:
    y = x * 2
    y.register_hook(hold_forever)
    return y


def at_peer(x: Any, to: Any) -> Any:
    return zrpc.rpc_sync(to, torch.sin, (x,))


def contexts() -> Any:
    return len(current_agent().service(AutogradService))


def backward_of_far(to: Any, mark: Any, relay: Any = None) -> None:
    os.environ["ZRPC_TEST_MARK"] = mark
    with dist_autograd.context() as context_id:
        x = torch.ones(3, requires_grad=True)
        if relay is not None:
            x = zrpc.rpc_sync(relay, at_peer, (x, to))
        far = zrpc.rpc_sync(to, held_with_mark, (x, mark))
        dist_autograd.backward(context_id, [far.sum()])


def held_with_mark(x: Any, mark: Any) -> Any:
    os.environ["ZRPC_TEST_MARK"] = mark
    return held(x)


@pytest.mark.zrpc(workers=3, processes=True, timeout=60)
@pytest.mark.parametrize("relay", [None, "worker1"])
def test_a_worker_that_is_killed_during_a_pass(mesh: Mesh, tmp_path: Path, relay: Any) -> None:
    mark = tmp_path / "held"
    future = mesh.submit(0, backward_of_far, "worker2", str(mark), relay)
    until(mark.exists, "worker2 runs its part")
    mesh.kill("worker2")
    with pytest.raises(RuntimeError, match=r"worker2.*died|worker2.*gone"):
        future.result(SOON)
    for rank in range(2):
        until(lambda rank=rank: mesh.run(rank, contexts) == 0, f"worker{rank} has no context")
    found = mesh.run(0, gradient_over, "worker1")
    torch.testing.assert_close(found, torch.ones(3).cos())


def gradient_over(to: Any) -> Any:
    with dist_autograd.context() as context_id:
        x = torch.ones(3, requires_grad=True)
        dist_autograd.backward(context_id, [zrpc.rpc_sync(to, torch.sin, (x,)).sum()])
        return dist_autograd.get_gradients(context_id)[x]


def forward_only(to: Any) -> None:
    """Enters a context that stays open."""
    module = current_agent()
    module.test_context = dist_autograd.context()
    context_id = module.test_context.__enter__()
    x = torch.ones(3, requires_grad=True)
    module.test_loss = (context_id, zrpc.rpc_sync(to, torch.sin, (x,)).sum())


def knows_of_death(to: Any) -> Any:
    try:
        zrpc.rpc_sync(to, max, (1, 2))
    except ConnectionError:
        return True
    return False


def backward_of_kept() -> None:
    agent = current_agent()
    context_id, loss = agent.test_loss
    try:
        dist_autograd.backward(context_id, [loss])
    finally:
        del agent.test_loss
        agent.test_context.__exit__(None, None, None)
        del agent.test_context


@pytest.mark.zrpc(workers=3, processes=True, timeout=30)
def test_a_worker_that_was_dead_before_the_pass(mesh: Mesh) -> None:
    mesh.run(0, forward_only, "worker2")
    mesh.kill("worker2")
    until(lambda: mesh.run(0, knows_of_death, "worker2"))
    with pytest.raises(RuntimeError, match="worker2"):
        mesh.submit(0, backward_of_kept).result(SOON / 2)
    assert mesh.run(0, contexts) == 0
    torch.testing.assert_close(mesh.run(0, gradient_over, "worker1"), torch.ones(3).cos())


def forward_used_and_unused(used: Any, unused: Any) -> None:
    """Enters a context that stays open."""
    forward_only(unused)
    agent = current_agent()
    context_id, _ = agent.test_loss
    x = torch.ones(3, requires_grad=True)
    agent.test_loss = (context_id, zrpc.rpc_sync(used, torch.sin, (x,)).sum())


@pytest.mark.zrpc(workers=3, processes=True, timeout=30)
def test_a_worker_that_was_dead_before_the_pass_and_is_not_needed(mesh: Mesh) -> None:
    mesh.run(0, forward_used_and_unused, "worker1", "worker2")
    mesh.kill("worker2")
    until(lambda: mesh.run(0, knows_of_death, "worker2"))
    mesh.submit(0, backward_of_kept).result(SOON / 2)
    assert mesh.run(0, contexts) == 0


def enter_and_wait(to: Any, mark: Any) -> None:
    with dist_autograd.context():
        zrpc.rpc_sync(to, torch.sin, (torch.ones(3, requires_grad=True),))
        open(mark, "w").close()
        threading.Event().wait(60)


@pytest.mark.zrpc(workers=3, processes=True, timeout=60)
def test_the_contexts_of_a_worker_that_dies_are_freed(mesh: Mesh, tmp_path: Path) -> None:
    mark = tmp_path / "entered"
    mesh.submit(2, enter_and_wait, "worker1", str(mark))
    until(mark.exists)
    assert mesh.run(1, contexts) == 1
    mesh.kill("worker2")
    until(lambda: mesh.run(1, contexts) == 0, "the context of the dead worker is freed")


def sine_by_the_last(x: Any) -> Any:
    return zrpc.rpc_sync("worker2", torch.sin, (x,))


@pytest.mark.parametrize("ends_first", [False, True])
def test_a_context_that_went_on_by_a_worker_that_is_gone(mesh: Mesh, ends_first: bool) -> None:
    """worker0 knows nothing of worker2, and the one who could tell has left the mesh."""
    far = mesh.agent(2).service(AutogradService)
    is_told, go = threading.Event(), threading.Event()

    def run() -> None:
        with dist_autograd.context():
            zrpc.rpc_sync("worker1", sine_by_the_last, (torch.ones(3, requires_grad=True),))
            assert len(far) == 1
            is_told.set()
            assert go.wait(SOON)

    running = mesh.submit(0, run)
    assert is_told.wait(SOON)
    if ends_first:  # its end comes to worker1, and not from there to worker2
        mesh.agent(1).service(AutogradService).contexts.release = lambda *_, **__: None
        go.set()
        running.result(SOON)
        until(lambda: len(mesh.agent(0).service(AutogradService)) == 0)
    with posted(mesh) as counts:
        mesh.run(1, zrpc.shutdown, graceful=False)
        until(lambda: 1 in mesh.agent(2).membership.lost)
        until(lambda: counts[Kind.ENLIST] == 1)
        if not ends_first:
            settle_two(mesh)
            assert len(far) == 1  # worker0 is not done with it
            go.set()
            running.result(SOON)
        until(lambda: len(far) == 0, "the context is freed at worker2")


def settle_two(mesh: Mesh) -> None:
    for _ in range(3):
        for rank, to in ((0, 2), (2, 0)):
            with mesh.agent(rank).as_current():
                assert zrpc.rpc_sync(to, max, (1, 2)) == 2


def test_a_context_whose_maker_was_gone_when_it_came(mesh: Mesh) -> None:
    """By worker1, which had not learned that yet, and is gone then, too."""
    far = mesh.agent(2).service(AutogradService)
    mesh.agent(1).service(AutogradService).on_member_lost = lambda member: None
    here_too, go = threading.Event(), threading.Event()

    def pass_on(x: Any) -> Any:
        here_too.set()
        assert go.wait(SOON)
        with zrpc.current_call().shield():  # or its calls would end with that of its caller
            return sine_by_the_last(x)

    def run() -> None:
        with dist_autograd.context():
            future = zrpc.rpc_async("worker1", here(pass_on), (torch.ones(3, requires_grad=True),))
            assert here_too.wait(SOON)
            zrpc.shutdown(graceful=False)
            with pytest.raises(zrpc.RpcError):
                future.wait()

    mesh.run(0, run)
    until(lambda: 0 in mesh.agent(2).membership.lost)
    go.set()
    until(lambda: len(far) == 1, "the context comes to worker2")
    mesh.run(1, zrpc.shutdown, graceful=False)
    until(lambda: len(far) == 0, "the context is freed at worker2")

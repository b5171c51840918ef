"""Many threads in one context, and many contexts over the same parameters."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
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
    gradients,
    gradients_at,
    layer,
    leaf,
    local_gradients,
)
from tests.support.identity import here
from zrpc.agent.current import find_agent
from zrpc.services.autograd.contexts import PASS_LAYOUT
from zrpc.services.autograd.service import AutogradService
from zrpc.testing import Mesh
from zrpc.wire.kind import Kind, Tag
from zrpc.wire.message import Message

pytestmark = pytest.mark.zrpc(workers=3, timeout=90)


def fan_out(calls: Any) -> Any:
    """The results of several calls at once, by threads of the callees."""
    if find_agent() is None:
        return [call(to, fn, *args) for to, fn, *args in calls]
    futures = [zrpc.rpc_async(to, here(fn), args) for to, fn, *args in calls]
    return [future.wait() for future in futures]


def test_a_fan_out_of_handlers_that_fan_out(mesh: Mesh) -> None:
    def there(rank: Any, x: Any) -> Any:
        x = layer(rank, x)
        parts = fan_out([(f"worker{to}", layer, to, x * i) for i, to in enumerate((0, 1, 2))])
        return x + sum(parts)

    def model() -> Any:
        parts = fan_out([(f"worker{i % 3}", there, i % 3, X * i) for i in range(9)])
        return sum(parts).sum()

    assert_as_local(mesh, model, LEAVES)


def test_handlers_that_run_at_the_same_time(mesh: Mesh) -> None:
    """All of them have received before the first one answers."""
    barrier = threading.Barrier(8)

    def there(x: Any) -> Any:
        if find_agent() is not None:
            barrier.wait(SOON)
        return layer(1, x)

    def model() -> Any:
        return sum(fan_out([("worker1", there, X * i) for i in range(8)])).sum()

    assert_as_local(mesh, model, LEAVES)


@pytest.mark.system
def test_contexts_over_the_same_parameters(mesh: Mesh) -> None:
    """Trainers at one parameter worker: threads of one process each."""
    count = 16
    weight = W[2]
    together = threading.Barrier(count)

    def there(x: Any) -> Any:
        return (x @ weight).sin()

    def trainer(number: Any) -> Any:
        rank = number % 2
        with mesh.agent(rank).as_current():
            found = []
            for step in range(4):
                with dist_autograd.context() as context_id:
                    x = torch.full((3,), float(number + 1), dtype=torch.float64)
                    far = call("worker2", there, x)
                    far = call("worker2", there, far)
                    together.wait(SOON)
                    dist_autograd.backward(context_id, [far.sum() * (step + 1)])
                    together.wait(SOON)
                    found.append(gradients_at(mesh, 2, context_id)[weight])
            return found

    with ThreadPoolExecutor(count) as pool:
        outcomes = list(pool.map(trainer, range(count)))
    for number, found in enumerate(outcomes):
        x = torch.full((3,), float(number + 1), dtype=torch.float64)
        [expected] = torch.autograd.grad(there(there(x)).sum(), [weight])
        torch.testing.assert_close(found, [expected * (step + 1) for step in range(4)])
    assert weight.grad is None
    assert_freed(mesh)


@pytest.mark.system
def test_contexts_that_go_through_all_workers_in_both_directions(mesh: Mesh) -> None:
    """Trainers at either end of one chain, over the same parameters, which have hooks."""
    together = threading.Barrier(3)
    calls = [0] * 3

    def chain(ranks: Any, x: Any) -> Any:
        rank, *rest = ranks
        x = layer(rank, x)
        return call(f"worker{rest[0]}", chain, rest, x) if rest else x

    def model(rank: Any) -> Any:
        order = [rank, (rank + 1) % 3, (rank + 2) % 3, rank]
        return chain(order, X * (rank + 1)).sum()

    def trainer(rank: Any) -> None:
        [expected] = local_gradients(lambda: model(rank), [W[2]])
        with mesh.agent(rank).as_current():
            for _ in range(10):
                together.wait(SOON)
                with dist_autograd.context() as context_id:
                    dist_autograd.backward(context_id, [model(rank)])
                    torch.testing.assert_close(gradients(mesh, context_id)[W[2]], expected)

    def count(rank: Any, _: Any) -> None:
        calls[rank] += 1

    with ExitStack() as stack:
        for rank in range(3):
            handle = W[rank].register_post_accumulate_grad_hook(partial(count, rank))
            stack.callback(handle.remove)
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(trainer, range(3)))
    assert calls == [30] * 3
    assert all(w.grad is None for w in W)
    assert_freed(mesh)


def test_two_passes_at_once_in_one_context(caller: Mesh) -> None:
    with dist_autograd.context() as context_id:
        losses = [call("worker1", layer, 1, X * i).sum() for i in range(1, 5)]
        agent = caller.agent(0)

        def go_back(loss: Any) -> None:
            with agent.as_current():
                dist_autograd.backward(context_id, [loss], retain_graph=True)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(go_back, losses))
        found = gradients_at(caller, 0, context_id)[X], gradients_at(caller, 1, context_id)[W[1]]
    expected = local_gradients(lambda: sum(layer(1, X * i).sum() for i in range(1, 5)), [X, W[1]])
    torch.testing.assert_close(list(found), expected)


@pytest.mark.system
@pytest.mark.zrpc(workers=2, options={"num_worker_threads": 2})
def test_more_contexts_than_threads(mesh: Mesh) -> None:
    """Passes that wait hold no thread that others need."""
    count = 12
    together = threading.Barrier(count)

    def there(depth: Any, x: Any) -> Any:
        x = layer(depth % 2, x)
        return call(f"worker{depth % 2}", there, depth - 1, x) if depth else x

    def trainer(number: Any) -> Any:
        with mesh.agent(0).as_current(), dist_autograd.context() as context_id:
            loss = call("worker1", there, 4, X * number).sum()
            together.wait(SOON)
            dist_autograd.backward(context_id, [loss])
            return dist_autograd.get_gradients(context_id)[X]

    with ThreadPoolExecutor(count) as pool:
        outcomes = list(pool.map(trainer, range(count)))
    for number, found in enumerate(outcomes):
        [expected] = local_gradients(lambda n=number: there(4, X * n).sum(), [X])
        torch.testing.assert_close(found, expected)
    assert_freed(mesh)


def test_calls_go_on_while_a_pass_runs(mesh: Mesh) -> None:
    """In the same context too; they are not part of it."""
    results = []

    def hook(gradient: Any) -> None:
        results.append(call("worker2", layer, 2, X).sum().item())
        results.append(call("worker0", layer, 0, X).sum().item())

    with W[1].register_hook(hook):

        def run() -> Any:
            with dist_autograd.context() as context_id:
                loss = call("worker1", layer, 1, X * 2).sum()
                W0 = layer(0, X).register_hook(hook)
                dist_autograd.backward(context_id, [loss])
                assert W0 is not None
                return gradients_at(mesh, 0, context_id)[X]

        found = mesh.run(0, run)
    [expected] = local_gradients(lambda: layer(1, X * 2).sum(), [X])
    torch.testing.assert_close(found, expected)
    assert len(results) == 2
    assert_freed(mesh)


def test_hooks_of_one_context_while_those_of_another_run(mesh: Mesh) -> None:
    """A hook on the accumulated gradient takes its time; a tensor hook is called meanwhile.

    The second hook on the accumulated gradient waits for the first, as it does in torch: the node
    has a lock.
    """
    w = leaf(3, seed=31)
    inside, through = threading.Event(), threading.Event()
    accumulated, passed = [], []

    def there(x: Any) -> Any:
        return x * w

    def slow(parameter: Any) -> None:
        first = not accumulated
        accumulated.append(parameter.grad.clone())
        if first:
            inside.set()
            assert through.wait(SOON)

    def quick(gradient: Any) -> None:
        passed.append(gradient.clone())
        if inside.is_set():
            through.set()

    handles = [
        w.register_hook(quick),
        w.register_post_accumulate_grad_hook(slow),
    ]

    def trainer(number: Any) -> None:
        with mesh.agent(0).as_current(), dist_autograd.context() as context_id:
            x = X.detach().requires_grad_()
            if number:
                assert inside.wait(SOON)
            dist_autograd.backward(context_id, [(call("worker1", there, x) * (number + 1)).sum()])

    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(trainer, range(2)))
    finally:
        through.set()
        for handle in handles:
            handle.remove()
    expected = [X.detach(), X.detach() * 2]
    torch.testing.assert_close(accumulated, expected)
    torch.testing.assert_close(passed, expected)


def test_the_io_thread_does_not_wait_while_gradients_are_added_up(mesh: Mesh) -> None:
    """It looks who takes part in passes, each second, and takes in gradients."""
    agent = mesh.agent(0)
    layer_of_autograd = agent.service(AutogradService)
    done = threading.Event()
    with agent.as_current(), dist_autograd.context() as context_id:
        extension = [(Tag.PASS, PASS_LAYOUT.pack(context_id, 7, 0))]

        def look() -> None:
            message = Message(Kind.GRADIENT, extensions=extension, sender=1)
            message.attachments = {Tag.PASS: PASS_LAYOUT.unpack(extension[0][1])}
            layer_of_autograd.handlers()[Kind.GRADIENT](message)
            agent.awaited_members()
            done.set()

        with layer_of_autograd.contexts.find(context_id).lock:
            agent.receiver.in_io_thread(look)
            assert done.wait(SOON)


def share_a_leaf(layout: str) -> None:
    """Sends a leaf in one thread, and starts graphs at it in two others."""
    leaf = torch.eye(3)
    leaf = (leaf.to_sparse() if layout == "sparse" else leaf).requires_grad_()
    done = threading.Event()

    def start_graphs() -> None:
        while not done.is_set():
            leaf * 1

    threads = [threading.Thread(target=start_graphs) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(300):
            with dist_autograd.context():
                zrpc.rpc_sync("worker1", torch.numel, (leaf,))
    finally:
        done.set()
        for thread in threads:
            thread.join()


@pytest.mark.zrpc(workers=2, processes=True, timeout=120)
@pytest.mark.parametrize("layout", ["strided", "sparse"])
def test_a_leaf_is_sent_while_other_threads_use_it(mesh: Mesh, layout: str) -> None:
    """The interpreter's lock is not held while torch's lock of the leaf is waited for."""
    mesh.submit(0, share_a_leaf, layout).result(60)

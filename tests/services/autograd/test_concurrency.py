"""Many threads in one context, and many contexts over the same parameters."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import zrpc
import zrpc.autograd as dist_autograd
from tests.services.autograd.split_models import (
    LEAVES,
    W,
    X,
    assert_as_local,
    assert_freed,
    call,
    gradients,
    layer,
    layers,
    local_gradients,
)
from tests.support.identity import here
from tests.support.waiting import SOON
from zrpc.agent.current import find_agent
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
    """All handlers have received before the first one calls and answers."""
    together = threading.Barrier(9)

    def there(rank: Any, x: Any) -> Any:
        x = layer(rank, x)
        if find_agent() is not None:
            together.wait(SOON)
        parts = fan_out([(f"worker{to}", layer, to, x * i) for i, to in enumerate((0, 1, 2))])
        return x + sum(parts)

    def model() -> Any:
        parts = fan_out([(f"worker{i % 3}", there, i % 3, X * i) for i in range(9)])
        return sum(parts).sum()

    assert_as_local(mesh, model, LEAVES)


def test_passes_at_once_in_one_context(caller: Mesh) -> None:
    def run_backward(loss: torch.Tensor) -> None:
        with caller.agent(0).as_current():
            dist_autograd.backward(context_id, [loss], retain_graph=True)

    with dist_autograd.context() as context_id:
        losses = [call("worker1", layer, 1, X * i).sum() for i in range(1, 5)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(run_backward, losses))
        found = gradients(caller, context_id)
    expected = local_gradients(lambda: sum(layer(1, X * i).sum() for i in range(1, 5)), [X, W[1]])
    torch.testing.assert_close([found[X], found[W[1]]], expected)


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


def test_the_io_thread_does_not_wait_while_gradients_are_added_up(mesh: Mesh) -> None:
    """It looks who takes part in passes, each second, and takes in gradients."""
    agent, [service, *_] = mesh.agent(0), layers(mesh)
    done = threading.Event()
    with agent.as_current(), dist_autograd.context() as context_id:

        def look() -> None:
            message = Message(Kind.GRADIENT, sender=1)
            message.attachments = {Tag.PASS: (context_id, 7, 0)}
            service.handlers()[Kind.GRADIENT](message)
            agent.awaited_members()
            done.set()

        with service.contexts.find(context_id).lock:
            agent.receiver.in_io_thread(look)
            assert done.wait(SOON)


def share_leaves() -> None:
    """Sends a leaf in one thread, and starts graphs at it in two others."""
    for leaf in (torch.eye(3), torch.eye(3).to_sparse()):
        leaf.requires_grad_()
        done = threading.Event()

        def start_graphs(leaf: torch.Tensor = leaf, done: threading.Event = done) -> None:
            while not done.is_set():
                leaf * 1

        with ThreadPoolExecutor(2) as pool:
            for _ in range(2):
                pool.submit(start_graphs)
            try:
                for _ in range(300):
                    with dist_autograd.context():
                        zrpc.rpc_sync("worker1", torch.numel, (leaf,))
            finally:
                done.set()


@pytest.mark.zrpc(workers=2, processes=True, timeout=120)
def test_a_leaf_is_sent_while_other_threads_use_it(mesh: Mesh) -> None:
    """The interpreter's lock is not held while torch's lock of the leaf is waited for."""
    mesh.submit(0, share_leaves).result(60)

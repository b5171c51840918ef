"""Workers that die during a pass, or before it."""

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
    SOON,
    posted,
)
from tests.support.waiting import until
from zrpc.agent.current import current_agent
from zrpc.services.autograd.service import AutogradService
from zrpc.testing import Mesh
from zrpc.wire.kind import Kind

pytestmark = pytest.mark.zrpc(workers=3, timeout=15)


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

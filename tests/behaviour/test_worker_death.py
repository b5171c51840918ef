"""A worker dies while every feature is in use: what becomes of each, and of the others."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import zrpc
from tests.support.waiting import until
from zrpc import autograd as dist_autograd
from zrpc.agent.current import current_agent
from zrpc.optim import DistributedOptimizer
from zrpc.services.autograd.service import AutogradService
from zrpc.services.rref.service import RRefService
from zrpc.testing import Mesh

TIMEOUT_SECONDS = 15.0

# The functions below are sent to the workers' processes by value. The agent keeps their state.


def kept() -> dict[str, Any]:
    agent = current_agent()
    if not hasattr(agent, "test_kept"):
        agent.test_kept = {}
    return agent.test_kept


def parameter() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


def hold(rref: zrpc.RRef[Any]) -> None:
    kept()["held"] = rref


def scaled(rref: zrpc.RRef[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return rref.local_value() * x


def begin() -> None:
    """Gives worker0 RRefs on both others, an optimizer over them, and a context with both."""
    mine = kept()
    mine["rrefs"] = [zrpc.remote(to, parameter) for to in ("worker1", "worker2")]
    mine["to_dead"] = zrpc.remote("worker2", list, args=((1, 2),))
    mine["optimizer"] = DistributedOptimizer(torch.optim.SGD, mine["rrefs"], lr=0.5)
    mine["context"] = dist_autograd.context()
    mine["context_id"] = mine["context"].__enter__()
    x = torch.ones(2)
    for rref in mine["rrefs"]:
        x = zrpc.rpc_sync(rref.owner(), scaled, (rref, x))
    mine["loss"] = x.sum()
    # Only worker1 holds a value of worker2's, and only worker2 one of worker0's.
    zrpc.rpc_sync("worker2", hold, (zrpc.RRef([3]),))


def begin_at_the_one_that_dies() -> None:
    """Makes it hold a value of worker1's, and begin a context there."""
    mine = kept()
    mine["rref"] = zrpc.remote("worker1", list, args=((4,),))
    assert mine["rref"].to_here() == [4]
    mine["context"] = dist_autograd.context()
    mine["context"].__enter__()
    zrpc.rpc_sync("worker1", torch.sin, (torch.ones(1, requires_grad=True),))


def error_of(use: Callable[[], object]) -> tuple[str, str]:
    try:
        use()
    except Exception as error:
        return type(error).__name__, str(error)
    return "none", ""


def uses() -> tuple[dict[str, tuple[str, str]], float]:
    """Returns the errors of worker0's operations by name, and how long all of them took."""
    mine, began = kept(), time.monotonic()
    outcome = {
        "call": error_of(lambda: zrpc.rpc_sync("worker2", max, (1, 2))),
        "remote": error_of(lambda: zrpc.remote("worker2", list).to_here()),
        "to_here": error_of(mine["to_dead"].to_here),
        "proxy": error_of(lambda: mine["to_dead"].rpc_sync().copy()),
        "backward": error_of(lambda: dist_autograd.backward(mine["context_id"], [mine["loss"]])),
        "step": error_of(lambda: mine["optimizer"].step(mine["context_id"])),
    }
    return outcome, time.monotonic() - began


def let_go() -> None:
    mine = kept()
    mine["context"].__exit__(None, None, None)
    mine.clear()


def what_is_left() -> tuple[int, ...]:
    import gc

    gc.collect()
    agent = current_agent()
    layer = agent.service(RRefService)
    with layer.lock:
        references = len(layer.references), len(layer.values)
    return (*references, len(agent.service(AutogradService)), len(agent.caller.calls))


def learn_and_step() -> list[float]:
    """Runs a whole step over the survivors."""
    rref = zrpc.remote("worker1", parameter)
    optimizer = DistributedOptimizer(torch.optim.SGD, [rref], lr=0.5)
    with dist_autograd.context() as context_id:
        loss = zrpc.rpc_sync("worker1", scaled, (rref, torch.ones(2))).sum()
        dist_autograd.backward(context_id, [loss])
        optimizer.step(context_id)
    return rref.to_here().tolist()


@pytest.mark.zrpc(
    workers=3,
    processes=True,
    timeout=90,
    options={"heartbeat_timeout": 1.5, "rpc_timeout": 30},
)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_worker_dies_while_everything_is_in_use(mesh: Mesh, how: signal.Signals) -> None:
    mesh.run(0, begin)
    mesh.run(2, begin_at_the_one_that_dies)
    assert mesh.run(1, what_is_left)[2] == 2  # the contexts of both
    os.kill(mesh.pid(2), how)
    until(lambda: mesh.run(0, lambda: 2 in current_agent().membership.lost), "worker0 knows")
    until(lambda: mesh.run(1, lambda: 2 in current_agent().membership.lost), "worker1 knows")

    outcome, took = mesh.run(0, uses)
    kinds = {name: kind for name, (kind, _) in outcome.items()}
    assert kinds == {
        "call": "WorkerDied",
        "remote": "OwnerDied",
        "to_here": "OwnerDied",
        "proxy": "OwnerDied",
        "backward": "WorkerDied",
        "step": "OwnerDied",
    }
    assert all("worker2 (rank 2) is gone" in text for _, text in outcome.values()), outcome
    assert all("last heard from at" in text for _, text in outcome.values()), outcome
    assert took < TIMEOUT_SECONDS / 3

    # All that the dead worker held or had begun is freed, and also what others have of it, once
    # they let go.
    mesh.run(0, let_go)
    for rank in (0, 1):
        until(lambda rank=rank: mesh.run(rank, what_is_left) == (0, 0, 0, 0), f"{rank} is free")
    assert mesh.run(0, learn_and_step) == [0.5, 0.5]
    # The others shut down together, without waiting for the one that is gone.
    for future in [mesh.submit(rank, zrpc.shutdown) for rank in (0, 1)]:
        future.result(TIMEOUT_SECONDS)
    mesh.kill(2)

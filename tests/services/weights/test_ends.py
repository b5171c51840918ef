"""Loads that wait, when the workers shut down or one of them leaves."""

from __future__ import annotations

from typing import Any

import pytest

import zrpc
from tests.services.weights.publishing import SOON, Learner, Rollout, raised_by, weights
from tests.support.observed import busy
from tests.support.waiting import until
from zrpc.nn import publish, subscribe
from zrpc.testing import Mesh


def load_later() -> int:
    return subscribe("p").load_into(weights(), at_least=2, timeout=0)


def publish_and_push() -> Any:
    published = publish("p", weights())
    published.push()
    return published


@pytest.mark.zrpc(workers=2, timeout=60)
@pytest.mark.parametrize("published", [True, False])
def test_loads_of_handlers_end_once_all_workers_have_called_shutdown(
    mesh: Mesh, published: bool
) -> None:
    learner = Learner(mesh) if published else None
    with mesh.agent(0).as_current():
        future = zrpc.rpc_async(1, load_later, timeout=0)
        if learner is not None:
            until(lambda: busy(mesh, 0), "the publisher is asked")
        ends = [mesh.submit(rank, zrpc.shutdown) for rank in (0, 1)]
        with pytest.raises(zrpc.RpcError, match="no worker will push one: all have called"):
            future.wait()
    for end in ends:
        end.result(SOON)


@pytest.mark.zrpc(workers=3, elastic=True, timeout=60)
def test_a_publisher_leaves_an_elastic_mesh_although_a_load_waits(mesh: Mesh) -> None:
    learner = Learner(mesh)
    for _ in range(5):
        learner.push()
    rollout = Rollout(mesh, 1)
    assert rollout.load() == 5
    waiting = mesh.submit(1, raised_by, rollout.subscriber.load_into, rollout.model, 6, 0)
    until(lambda: busy(mesh, 0), "the publisher is asked")
    mesh.submit(0, zrpc.shutdown).result(SOON)
    assert "the publisher's worker leaves" in str(waiting.result(SOON))
    until(lambda: len(mesh.agent(1).membership.living) == 2)
    assert isinstance(raised_by(rollout.load, 6), zrpc.WorkerDied)
    assert rollout.load() == 5
    successor = Learner(mesh, 2)
    assert rollout.load(successor.push()) > 5


@pytest.mark.zrpc(workers=2, timeout=60)
def test_what_waits_no_longer_is_not_kept(mesh: Mesh) -> None:
    learner = Learner(mesh)
    learner.push()
    for worker in (0, 1):
        rollout = Rollout(mesh, worker)
        for _ in range(3):
            with pytest.raises(zrpc.RpcTimeoutError):
                rollout.load(at_least=9, timeout=0.01)
    until(lambda: not busy(mesh, 0))

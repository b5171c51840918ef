"""Published weights on several hosts, once to each; of workers that are lost, and that join."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import zrpc
from tests.services.elastic.conftest import Elastic
from tests.services.shm.sharing import segments_mapped, service_of
from tests.services.weights.publishing import (
    SOON,
    Learner,
    Rollout,
    value_of,
    weights,
)
from tests.support.hosts import mesh_on_hosts, needs_tcp
from tests.support.observed import stats_of
from tests.support.parting import leaving_at_once
from tests.support.waiting import pending, until
from zrpc.agent.agent import Agent
from zrpc.nn import publish, subscribe
from zrpc.services.weights.service import WeightsService
from zrpc.testing import Mesh
from zrpc.testing.plugin import MakeMesh

pytestmark = [
    pytest.mark.system,
    pytest.mark.zrpc(workers=5, timeout=90),
    needs_tcp,
]

SIZE = 4 << 17


@pytest.fixture
def hosts(make_mesh: MakeMesh, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A mesh on two hosts, and the workers on either."""
    mesh, (few, many) = mesh_on_hosts(make_mesh, monkeypatch, workers=5)
    with leaving_at_once(mesh):
        yield mesh, few, many


def sent_by(mesh: Mesh, worker: int) -> int:
    """How many bytes a worker has sent to all others, without shared memory."""
    return sum(peer.bytes_sent for peer in stats_of(mesh, worker).peers.values())


def test_a_version_goes_once_to_each_host(hosts: Any) -> None:
    mesh, few, many = hosts
    learner = Learner(mesh, few[0])
    rollouts = [Rollout(mesh, worker) for worker in range(5)]
    for version in range(1, 5):
        before = sent_by(mesh, few[0])
        learner.push()
        loads = [rollout.begin_to_load(version) for rollout in rollouts]
        assert [load.result(SOON) for load in loads] == [version] * 5
        assert [rollout.value for rollout in rollouts] == [version] * 5
        assert SIZE < sent_by(mesh, few[0]) - before < 1.5 * SIZE
    assert len(many) == 3
    assert len(segments_mapped()) <= 6  # three on either host


def test_a_subscriber_waits_for_a_version_of_another_host(hosts: Any) -> None:
    mesh, few, many = hosts
    waiting = [Rollout(mesh, worker).begin_to_load(at_least=2) for worker in many]
    learner = Learner(mesh, few[0], versions=1)
    assert all(pending(each, 0.05) for each in waiting)
    learner.push()
    assert [each.result(SOON) for each in waiting] == [2] * 3
    known = Rollout(mesh, many[1])
    known.load()
    before = sent_by(mesh, few[0])
    assert known.load() == 2
    assert sent_by(mesh, few[0]) - before < SIZE / 10
    with pytest.raises(zrpc.RpcTimeoutError, match="version 9 or a later one of 'p' within"):
        known.load(at_least=9, timeout=0.05)


def test_if_the_worker_that_gets_versions_is_lost_another_one_does(hosts: Any) -> None:
    mesh, few, many = hosts
    learner = Learner(mesh, few[0], versions=1)
    rollouts = [Rollout(mesh, worker) for worker in many[1:]]
    assert [rollout.load() for rollout in rollouts] == [1, 1]
    waiting = [rollout.begin_to_load(at_least=2) for rollout in rollouts]
    mesh.agent(many[0]).close()
    learner.push()
    assert [each.result(SOON) for each in waiting] == [2, 2]
    learner.push()
    assert [rollout.load() for rollout in rollouts] == [3, 3]
    assert [rollout.value for rollout in rollouts] == [3, 3]


def test_if_the_publisher_is_lost_subscribers_on_all_hosts_are_told(hosts: Any) -> None:
    mesh, few, many = hosts
    _learner = Learner(mesh, few[0], versions=1)
    rollouts = [Rollout(mesh, worker) for worker in (*many, few[1])]
    assert [rollout.load() for rollout in rollouts] == [1] * 4
    waiting = [rollout.begin_to_load(at_least=2) for rollout in rollouts]
    assert pending(waiting[0], 0.05)
    mesh.agent(few[0]).close()
    for each in waiting:
        with pytest.raises(zrpc.WorkerDied, match=rf"its publisher is lost: .*worker{few[0]}"):
            each.result(SOON)
    assert [rollout.load() for rollout in rollouts] == [1] * 4  # what they have stays loadable
    successor = Learner(mesh, many[0])
    assert successor.push(5) > 1
    assert all(rollout.load(at_least=2) == successor.published.version for rollout in rollouts)
    assert [rollout.value for rollout in rollouts] == [5] * 4


@pytest.mark.parametrize("lost", [False, True], ids=["closed", "lost"])
def test_what_a_host_has_got_is_dropped_with_the_publication(hosts: Any, lost: bool) -> None:
    mesh, few, many = hosts
    learner = Learner(mesh, few[0], versions=1)
    rollouts = [Rollout(mesh, worker) for worker in many]
    assert [rollout.load() for rollout in rollouts] == [1] * 3
    if lost:
        mesh.agent(few[0]).close()
    else:
        mesh.run(few[0], learner.published.close)
    for rollout in rollouts:
        mesh.run(rollout.worker, rollout.subscriber.close)
    for worker in range(5):
        service_of(mesh, worker).idle_seconds = -1
    until(lambda: segments_mapped() == [], collect=True)


# -- joining --------------------------------------------------------------------------------------


def on(agent: Agent, function: Any, *args: Any) -> Any:
    with agent.as_current():
        return function(*args)


def loaded(at_least: int | None = None) -> tuple[int, float]:
    model = weights(-1, 5)
    with subscribe("p") as subscriber:
        return subscriber.load_into(model, at_least, SOON), value_of(model)


def knows(agent: Agent) -> bool:
    """Whether a worker has heard of the publication."""
    return agent.service(WeightsService).latest("p")[0] is not None


def test_workers_that_join_know_what_is_published_and_what_was(elastic: Elastic) -> None:
    first = elastic.join("first")
    model = weights(3, 5)
    published = on(first, publish, "p", model)
    published.push()
    second = elastic.join("second")
    assert on(second, loaded) == (1, 3.0)
    words = "found one on .*first"
    with pytest.raises(zrpc.RpcError, match=words):
        on(second, publish, "p", model)
    published.push()
    published.close()
    third = elastic.join("third")
    until(lambda: knows(third))
    first.shutdown()
    second.shutdown()
    successor = on(third, publish, "p", model)  # nobody else is left
    assert successor.push() == 3
    assert on(third, loaded) == (3, 3.0)

"""Published weights of workers that die, and of workers that join."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import zrpc
from tests.services.elastic.conftest import Elastic
from tests.services.shm.sharing import kept
from tests.services.weights.publishing import SOON, raised_by, value_of, weights
from tests.support.waiting import until
from zrpc.agent.agent import Agent
from zrpc.nn import publish, subscribe
from zrpc.services.weights.service import WeightsService
from zrpc.testing import Mesh

COUNT = 1 << 17
processes = pytest.mark.zrpc(workers=4, processes=True, timeout=120)


def begin(name: str = "p") -> None:
    kept()["model"] = weights(count=COUNT)
    kept()["published"] = publish(name, kept()["model"])


def push(value: float) -> int:
    for tensor in kept()["model"].values():
        tensor.fill_(value)
    version: int = kept()["published"].push()
    return version


def load(at_least: int | None = None) -> tuple[int, float]:
    """Loads with the subscriber of this process: the version, and the value of its elements."""
    subscriber = kept().setdefault("subscriber", None) or subscribe("p")
    kept()["subscriber"] = subscriber
    model = kept().setdefault("read", weights(-1, COUNT))
    return subscriber.load_into(model, at_least, SOON), value_of(model)


def segments() -> int:
    from zrpc.agent.current import current_agent
    from zrpc.services.shm.service import SharedMemoryService

    return len(current_agent().service(SharedMemoryService).pool)


@processes
def test_if_the_publisher_is_killed_its_subscribers_are_told_and_a_successor_is_newer(
    mesh: Mesh,
) -> None:
    mesh.run(0, begin)
    mesh.run(0, push, 1)
    assert mesh.run(0, push, 2) == 2
    assert [mesh.run(worker, load) for worker in (1, 2)] == [(2, 2.0)] * 2
    waiting = mesh.submit(1, raised_by, load, 3)
    mesh.kill(0)
    error = waiting.result(SOON)
    assert isinstance(error, zrpc.WorkerDied)
    assert "publisher is lost: " in str(error)
    assert "worker0" in str(error)
    assert "version 2" in str(error)
    assert mesh.run(1, load) == (2, 2.0)  # what it has stays loadable
    until(lambda: isinstance(mesh.run(2, _begun), bool))
    version = mesh.run(2, push, 7)
    assert version > 2
    assert mesh.run(1, load, version) == (version, 7.0)
    assert mesh.run(3, load) == (version, 7.0)


def _begun() -> bool | None:
    try:
        begin()
    except zrpc.RpcError:  # the death is not noticed yet
        return None
    return True


@processes
def test_a_subscriber_that_is_killed_while_it_reads_costs_one_version(mesh: Mesh) -> None:
    mesh.run(0, begin)
    for value in range(1, 4):
        mesh.run(0, push, value)
        assert [mesh.run(worker, load) for worker in (1, 2, 3)] == [(value, value)] * 3
    mesh.kill(3)
    for value in range(4, 10):
        assert mesh.run(0, push, value) == value
        assert [mesh.run(worker, load) for worker in (1, 2)] == [(value, value)] * 2
    assert mesh.run(0, segments) <= 4


# -- joining --------------------------------------------------------------------------------------


@pytest.fixture
def elastic() -> Iterator[Elastic]:
    mesh = Elastic()
    yield mesh
    mesh.close()


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


@pytest.mark.system
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

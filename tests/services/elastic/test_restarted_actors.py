"""Actors that are made again when another worker has the name of their owner."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

import zrpc as rpc
from tests.support.gates import Gate
from tests.support.identity import Same
from tests.support.waiting import SOON, until
from zrpc.agent.agent import Agent
from zrpc.services.rref.service import RRefService

if TYPE_CHECKING:
    from tests.services.elastic.conftest import Elastic

pytestmark = pytest.mark.system

SIZE = 3


@rpc.actor(restart=True)
class Counter:
    def __init__(self, start: int = 0) -> None:
        self.count = start

    def add(self, number: int) -> tuple[int, int]:
        self.count += number
        return self.count, rpc.get_worker_info().incarnation

    def wait(self, gate: Gate) -> None:
        gate.wait_inside()


@pytest.fixture
def workers(elastic: Elastic) -> list[Agent]:
    elastic.world_size = SIZE
    return elastic.join_all(SIZE, restarts=0)


@pytest.fixture
def die(elastic: Elastic, workers: list[Agent]) -> Callable[..., None]:
    """Ends a worker as kill -9 does; returns when the others know of it."""

    def die(rank: int = 1) -> None:
        dead = workers[rank].worker_info.member_id
        elastic.crash(workers[rank])
        for agent in elastic.agents:
            until(lambda agent=agent: dead in agent.membership.lost, "it is lost")

    return die


@pytest.fixture
def revive(elastic: Elastic, workers: list[Agent]) -> Callable[..., None]:
    def revive(rank: int = 1, count: int = 1) -> None:
        workers[rank] = elastic.join(f"w{rank}", rank, restarts=count)

    return revive


def make(agent: Agent, *args: Any, cls: Any = Counter, **more: Any) -> Any:
    with agent.as_current():
        rref = rpc.remote("w1", cls, args, **more)
        rref.ready(SOON)
        return rref


def hand_on(rref: Any, agent: Agent) -> Any:
    """Returns an RRef of another worker to the same value."""
    kept: list[Any] = []
    box = Same()
    box.keep = kept.append  # type: ignore[attr-defined]
    with rref._service.agent.as_current():
        rpc.rpc_sync(agent.worker_info, lambda rref: box.keep(rref), (rref,))  # type: ignore[attr-defined]
    return kept.pop()


def error_of(call: Callable[..., Any], *args: Any) -> rpc.RpcError:
    with pytest.raises(rpc.RpcError) as caught:
        call(*args)
    return caught.value


def test_the_maker_makes_it_again_with_its_arguments_and_all_rrefs_mean_the_new_one(
    workers: list[Agent], die: Callable[..., None], revive: Callable[..., None]
) -> None:
    counter = make(workers[0], 10)
    other = hand_on(counter, workers[2])
    assert counter.rpc_sync().add(1) == (11, 0)
    for count in (1, 2):
        die()
        revive(count=count)
        assert other.rpc_sync().add(1) == (11, count)
        assert counter.rpc_sync().add(1) == (12, count)
        assert counter == other
        assert counter.owner().incarnation == other.owner().incarnation == count
    # Also those that are handed on now, and those that the new owner gets.
    third = hand_on(other, workers[0])
    assert third.rpc_async().add(1).wait() == (13, 2)
    assert hand_on(other, workers[1]).local_value().count == 13

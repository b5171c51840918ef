"""Elastic meshes of agents in one process."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from tests.services.elastic.calls import PATIENCE, entered, finish
from tests.support.waiting import until
from zrpc.agent.agent import Agent
from zrpc.bootstrap import join_mesh
from zrpc.membership.secret import ClusterSecret, new_secret
from zrpc.options import ZmqRpcBackendOptions
from zrpc.services.elastic.follower import ElasticMembership
from zrpc.services.elastic.limits import ElasticLimits

# Of workers that join or leave.
_MAX_AT_ONCE = 16


class Elastic:
    """Agents that join one elastic mesh; each is closed at the end."""

    def __init__(self) -> None:
        self.store: dist.Store = dist.HashStore()
        self.secret: ClusterSecret | None = ClusterSecret(new_secret())
        self.world_size: int | None = None
        self.options: dict[str, Any] = {"init_timeout": PATIENCE}
        self.limits = ElasticLimits()
        self.agents: list[Agent] = []
        self._threads = ThreadPoolExecutor(_MAX_AT_ONCE)

    def join(self, name: str, rank: int | None = None, **kwargs: Any) -> Agent:
        options = ZmqRpcBackendOptions(**{**self.options, **kwargs.pop("options", {})})
        arguments = {
            "world_size": self.world_size,
            "store": self.store,
            "secret": self.secret,
            "elastic_limits": self.limits,
        }
        agent = join_mesh(name, rank=rank, options=options, **{**arguments, **kwargs})
        self.agents.append(agent)
        return agent

    def join_all(self, count: int, **kwargs: Any) -> list[Agent]:
        """Workers with the names w0, w1 ... and the ranks 0, 1 ..., which join at once."""
        return list(self._threads.map(lambda i: self.join(f"w{i}", i, **kwargs), range(count)))

    def leave(self, agent: Agent) -> Future[None]:
        """Begins the graceful shutdown of an agent."""
        return self._threads.submit(agent.shutdown)

    def crash(self, agent: Agent) -> None:
        """Ends an agent as if its process were killed: it says nothing to anybody."""
        agent._closing._say_farewell = agent.graceful_shutdown.leave_anyway
        agent.service(ElasticMembership).follower._announce_leave = lambda: None
        self.agents.remove(agent)
        agent.close()

    def close(self) -> None:
        agents, self.agents = self.agents, []
        self.store = None
        with self._threads:
            list(self._threads.map(Agent.close, agents))


class Crew(list[Agent]):
    """The three workers of a mesh of a fixed size, which are restarted when they have died."""

    def __init__(self, elastic: Elastic) -> None:
        self._elastic = elastic
        elastic.world_size = 3
        super().__init__(elastic.join_all(3, restarts=0))

    def die(self, rank: int = 1) -> None:
        """Ends a worker as kill -9 does; returns when the others know of it."""
        dead = self[rank].worker_info.member_id
        self._elastic.crash(self[rank])
        for agent in self._elastic.agents:
            until(lambda agent=agent: dead in agent.membership.lost, "it is lost")

    def revive(self, rank: int = 1, count: int = 1) -> Agent:
        """Restarts a worker; the old one may still be there, as if nobody had noticed its end."""
        self[rank] = self._elastic.join(f"w{rank}", rank, restarts=count)
        return self[rank]


@pytest.fixture(autouse=True)
def events() -> Iterator[None]:
    entered.clear()
    finish.clear()
    yield
    finish.set()


@pytest.fixture
def elastic(no_leaks: Any) -> Iterator[Elastic]:
    mesh = Elastic()
    yield mesh
    mesh.close()


@pytest.fixture
def workers(elastic: Elastic) -> Crew:
    return Crew(elastic)

"""Elastic meshes of agents in one process."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from tests.services.elastic.slow_handler import PATIENCE, entered, finish
from zrpc.agent.agent import Agent
from zrpc.bootstrap import join_mesh
from zrpc.membership.secret import ClusterSecret, new_secret
from zrpc.options import ZmqRpcBackendOptions
from zrpc.services.elastic.follower import ElasticMembership
from zrpc.services.elastic.limits import ElasticLimits


class Elastic:
    """Agents that join one elastic mesh; each is closed at the end."""

    def __init__(self) -> None:
        self.store: dist.Store = dist.HashStore()
        self.secret: ClusterSecret | None = ClusterSecret(new_secret())
        self.world_size: int | None = None
        self.options: dict[str, Any] = {"init_timeout": PATIENCE}
        self.limits = ElasticLimits()
        self.agents: list[Agent] = []

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
        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(lambda i: self.join(f"w{i}", i, **kwargs), range(count)))

    def crash(self, agent: Agent) -> None:
        """Ends an agent as if its process were killed: it says nothing to anybody."""
        agent._closing._say_farewell = agent.graceful_shutdown.leave_anyway
        agent.service(ElasticMembership).follower._announce_leave = lambda: None
        self.agents.remove(agent)
        agent.close()

    def close(self) -> None:
        agents, self.agents = self.agents, []
        self.store = None
        if agents:
            with ThreadPoolExecutor(len(agents)) as pool:
                list(pool.map(Agent.close, agents))


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

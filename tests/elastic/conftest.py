"""Elastic meshes of agents in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist
from slow_handler import PATIENCE, entered, finish

from zrpc.agent import Agent
from zrpc.api import start_agent
from zrpc.options import ZmqRpcBackendOptions
from zrpc.secret import ClusterSecret, new_secret


def wait_until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"timed out waiting until {what}"
        time.sleep(0.005)


class Elastic:
    """Agents that join one elastic mesh; each is closed at the end."""

    def __init__(self) -> None:
        self.store: dist.Store = dist.HashStore()
        self.secret: ClusterSecret | None = ClusterSecret(new_secret())
        self.world_size: int | None = None
        self.options: dict[str, Any] = {"init_timeout": PATIENCE}
        self.agents: list[Agent] = []

    def join(self, name: str, rank: int | None = None, **kwargs: Any) -> Agent:
        options = ZmqRpcBackendOptions(**{**self.options, **kwargs.pop("options", {})})
        arguments = {"world_size": self.world_size, "store": self.store, "secret": self.secret}
        agent = start_agent(name, rank=rank, options=options, **{**arguments, **kwargs})
        self.agents.append(agent)
        return agent

    def join_all(self, count: int, **kwargs: Any) -> list[Agent]:
        """Workers of the names w0, w1 ... and the ranks 0, 1 ..., which join at once."""
        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(lambda i: self.join(f"w{i}", i, **kwargs), range(count)))

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


@pytest.fixture
def until() -> Callable[..., None]:
    return wait_until

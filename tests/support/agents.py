"""Agents that a test joins to a mesh itself, with services of its own, for example."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch.distributed import HashStore

from tests.support.threads import start_all
from tests.support.waiting import SOON
from zrpc.agent.agent import Agent
from zrpc.bootstrap import join_mesh
from zrpc.options import ZmqRpcBackendOptions


def join_all(*workers: tuple[str, int, int], **how: Any) -> list[Any]:
    """Joins workers over one store, each in a thread; returns the agent or the error of each.

    Args:
        workers: name, rank and world size of each.
        how: other arguments of `join_mesh`, for all.
    """
    options = ZmqRpcBackendOptions(init_timeout=10, rpc_timeout=20)
    how = {"store": HashStore(), "options": options, **how}

    def join(name: str, rank: int, world_size: int) -> Any:
        return join_mesh(name, rank=rank, world_size=world_size, **how)

    return start_all([partial(join, *worker) for worker in workers], SOON)()


@contextlib.contextmanager
def joined(*options: Mapping[str, Any]) -> Iterator[list[Agent]]:
    """The agents of worker0, worker1 ..., with options for each; they are closed at the end."""
    store, size = HashStore(), len(options)

    def join(rank: int) -> Any:
        own = ZmqRpcBackendOptions(**{"init_timeout": 20, "rpc_timeout": 20, **options[rank]})
        return join_mesh(f"worker{rank}", rank=rank, world_size=size, store=store, options=own)

    outcomes = start_all([partial(join, rank) for rank in range(size)], SOON)()
    agents = [each for each in outcomes if isinstance(each, Agent)]
    try:
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        yield agents
    finally:
        start_all([partial(agent.shutdown, graceful=True) for agent in agents], SOON)()

"""Agents that a test joins to a mesh itself, with services of its own, for example."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.distributed import HashStore

from tests.support.threads import start_all
from tests.support.waiting import SOON
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

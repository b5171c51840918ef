"""The place where a driver and the workers that it has started meet."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import Store

from zrpc.agent.agent import Agent
from zrpc.agent.current import set_default_agent
from zrpc.bootstrap import join_mesh
from zrpc.membership.secret import ClusterSecret
from zrpc.membership.store import connect_store
from zrpc.options import ZmqRpcBackendOptions

DRIVER = "driver"


@dataclass(frozen=True)
class MeetingPlace:
    """What a member needs to join; it can be pickled for the workers.

    Attributes:
        init_method: the URL of the store in which all meet.
        num_workers: how many there are besides the driver, which has the last rank; None if they
            come and go.
        secret: the mesh's own; None for that of the environment.
        options: for all members; their ``init_method`` doesn't count. None for the default ones,
            which each member takes from its own environment.
        restarts: whether workers may be started again.
        sockets: the directory for Unix sockets, if the driver has made one.
    """

    init_method: str
    num_workers: int | None
    secret: str | None
    options: ZmqRpcBackendOptions | None
    restarts: bool = False
    sockets: Path | None = None

    @property
    def own_options(self) -> ZmqRpcBackendOptions:
        """The options of the member that this process is."""
        return self.options or ZmqRpcBackendOptions()

    def __repr__(self) -> str:
        return f"<the store of a mesh at {self.init_method}>"  # without the secret

    def join(
        self, name: str, rank: int | None, restarts: int = 0, store: Store | None = None
    ) -> Agent:
        """Joins the mesh, as the process's default agent.

        Args:
            name: this member's name.
            rank: this member's rank; None for any free one.
            restarts: how often it was started again.
            store: the store, if it is open already.

        Raises:
            RendezvousError: the members do not meet in time.
        """
        options = self.own_options
        timeout = options.init_timeout
        size = None if self.num_workers is None else self.num_workers + 1
        store = store or connect_store(self.init_method, rank, size, timeout)
        store.set_timeout(timedelta(seconds=timeout))
        agent = join_mesh(
            name,
            rank=rank,
            world_size=size,
            store=store,
            options=options,
            init_method=self.init_method,
            secret=None if self.secret is None else ClusterSecret(self.secret),
            restarts=restarts if self.restarts else None,
            sockets=self.sockets,
        )
        set_default_agent(agent)
        return agent

    def join_as_driver(self, name: str = DRIVER, store: Store | None = None) -> Agent:
        """Joins the mesh as its driver; see `join`."""
        return self.join(name, self.num_workers, store=store)


def serve(place: bytes, name: str, rank: int, restarts: int) -> None:
    """Runs a worker that a driver has started: it serves calls until all others want to leave.

    Args:
        place: a pickled `MeetingPlace`.
        name: this worker's name.
        rank: this worker's rank.
        restarts: how often it was started again.
    """
    pickle.loads(place).join(name, rank, restarts).shutdown()

"""How a worker becomes a member: rendezvous, addresses, and the start of its agent."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Sequence

from torch.distributed import Store

from zrpc.agent import Agent, Layer
from zrpc.endpoints import Meeting, find_endpoints, make_keys
from zrpc.membership import Membership
from zrpc.options import ZmqRpcBackendOptions
from zrpc.rendezvous import Card, meet
from zrpc.secret import ClusterSecret, find_secret
from zrpc.transport.address import host_key, supports_ipc
from zrpc.transport.network import Network
from zrpc.worker_info import WorkerInfo

__all__ = ["join_mesh"]


def join_mesh(
    name: str,
    *,
    rank: int,
    world_size: int,
    store: Store,
    options: ZmqRpcBackendOptions | None = None,
    layers: Sequence[Callable[[Agent], Layer]] = (),
    init_method: str = "",
    secret: ClusterSecret | None = None,
) -> Agent:
    """Meets the other workers and starts an agent that serves them.

    Args:
        name: this worker's name, unlike all others'.
        rank: from 0 to ``world_size - 1``, unlike all others'.
        world_size: how many workers there are.
        store: the store that they all use.
        options: default: those of `ZmqRpcBackendOptions`.
        layers: what to plug in before the first message is read.
        init_method: where the store is, for the choice of a network interface.
        secret: signs what is written to the store. Default: that of the environment.

    Raises:
        AuthenticationError: the secrets of the workers differ, or can't be used.
        RendezvousError: the others did not come within ``options.init_timeout`` seconds, or
            don't fit together.
        RuntimeError: the name has a form that is not allowed.
    """
    options = options or ZmqRpcBackendOptions()
    meeting = Meeting(store, init_method, secret or find_secret(), options)
    keys = make_keys(meeting)
    info = WorkerInfo(name, rank)
    ipc = supports_ipc() and options.transport != "tcp"
    token = secrets.token_hex(16)
    network = Network(Card.identity_of(token), rank, world_size, ipc)
    try:
        card = Card(
            name=info.name,
            rank=rank,
            world_size=world_size,
            token=token,
            host_key=host_key(),
            directory=str(network.directory.path) if network.directory else "",
            ipc=ipc,
            main=_main_key(),
            public_key="" if keys is None else keys.public,
        )
        cards = meet(store, card, options.init_timeout, meeting.secret)
        membership = Membership(cards, rank)
        network.connect(find_endpoints(network, membership, meeting, keys))
        agent = Agent(network, membership, options, store)
    except BaseException:
        network.close(linger=0, lost=())
        raise
    agent.serve(layers)
    return agent


def _main_key() -> str:
    """What ``__main__`` is: the same string where the same script or module runs."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return f"-m {spec.name}"
    file = getattr(main, "__file__", None)
    return os.path.realpath(file) if file else f"process {os.getpid()} of {_PROCESS_TOKEN}"


_PROCESS_TOKEN = secrets.token_hex(8)

"""How a worker becomes a member: rendezvous, addresses, and the start of its agent."""

from __future__ import annotations

import logging
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from torch.distributed import Store

from zrpc.agent import Agent, Layer
from zrpc.errors import RpcError
from zrpc.membership import Membership
from zrpc.options import ZmqRpcBackendOptions
from zrpc.rendezvous import Card, exchange, master_host, meet
from zrpc.secret import ClusterSecret, find_secret
from zrpc.transport.address import host_key, interface_towards, supports_ipc
from zrpc.transport.network import Network
from zrpc.worker_info import WorkerInfo

__all__ = ["join_mesh"]

logger = logging.getLogger(__name__)


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
    secret = secret or find_secret()
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
        )
        membership = Membership(meet(store, card, options.init_timeout, secret), rank)
        network.connect(_endpoints(network, membership, store, options, init_method, secret))
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


def _endpoints(
    network: Network,
    membership: Membership,
    store: Store,
    options: ZmqRpcBackendOptions,
    init_method: str,
    secret: ClusterSecret | None,
) -> list[str]:
    """Where each worker can be reached; listens on tcp where any pair of workers needs that."""
    cards = membership.cards
    endpoints = [f"ipc://{Path(card.directory) / 'inbox'}" for card in cards]
    if all(card.ipc for card in cards) and len({card.host_key for card in cards}) == 1:
        return endpoints
    if options.transport == "ipc":
        hosts = sorted({card.host_key.split("/")[0] for card in cards})
        raise RpcError(
            f"transport='ipc' needs all workers on one host with one directory for sockets, "
            f"but they are on {len(hosts)} hosts, or see different ones"
        )
    host = master_host(init_method) if init_method else "127.0.0.1"
    mine = network.listen_tcp(interface_towards(host))
    tcp = exchange(store, list(cards), membership.rank, mine, options.init_timeout, secret)
    if not all("://127." in endpoint or "://[::1]" in endpoint for endpoint in tcp):
        logger.warning(
            "%s talks to other hosts over tcp without encryption: whoever can read or write "
            "that network can run code here; use it in networks that you trust",
            membership.info,
        )
    return [
        endpoints[card.rank] if membership.reaches_by_ipc(card.rank) else tcp[card.rank]
        for card in cards
    ]

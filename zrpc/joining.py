"""How a worker becomes a member: rendezvous, addresses, and the start of its agent."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from torch.distributed import Store

from zrpc.agent import Agent, Layer
from zrpc.card import Card
from zrpc.elastic import ElasticLayer, claim
from zrpc.endpoints import Meeting, find_endpoints, listen, make_keys, tell_of_listening
from zrpc.entries import Entries
from zrpc.errors import AuthenticationError, RendezvousError
from zrpc.item import Departure, Item, Verb
from zrpc.membership import Membership
from zrpc.news import News
from zrpc.options import ZmqRpcBackendOptions
from zrpc.rendezvous import meet, store_failed
from zrpc.roster import Roster
from zrpc.secret import ClusterSecret, find_secret
from zrpc.transport.address import host_key, supports_ipc
from zrpc.transport.network import Network
from zrpc.worker_info import WorkerInfo

__all__ = ["join_mesh"]

# How many workers an elastic mesh may have, for the limits of ZeroMQ.
_MANY = 4096


def join_mesh(
    name: str,
    *,
    rank: int | None,
    world_size: int | None,
    store: Store,
    options: ZmqRpcBackendOptions | None = None,
    layers: Sequence[Callable[[Agent], Layer]] = (),
    init_method: str = "",
    secret: ClusterSecret | None = None,
    restarts: int | None = None,
) -> Agent:
    """Meets the other workers and starts an agent that serves them.

    Args:
        name: this worker's name, unlike all others'.
        rank: from 0 to ``world_size - 1``, unlike all others'; None for one that is free, where
            there is no world size.
        world_size: how many workers there are; None where they come and go.
        store: the store that they all use.
        options: default: those of `ZmqRpcBackendOptions`.
        layers: what to plug in before the first message is read.
        init_method: where the store is, for the choice of a network interface.
        secret: signs what is written to the store. Default: that of the environment.
        restarts: how often this worker was started again, in a mesh of a fixed size in which
            workers are; None where they are not.

    Raises:
        AuthenticationError: the secrets of the workers differ, or can't be used.
        RendezvousError: the others did not come within ``options.init_timeout`` seconds, or
            don't fit together.
        RuntimeError: the name has a form that is not allowed.
    """
    options = options or ZmqRpcBackendOptions()
    meeting = Meeting(store, init_method, secret or find_secret(), options)
    keys = make_keys(meeting)
    WorkerInfo(name, rank or 0)  # checks the name
    ipc = supports_ipc() and options.transport != "tcp"
    token = secrets.token_hex(16)
    network = Network(Card.identity_of(token), rank or 0, world_size or _MANY, ipc)
    try:
        card = Card(
            name=name,
            rank=-1 if rank is None else rank,
            world_size=world_size or 0,
            token=token,
            host_key=host_key(),
            directory=str(network.directory.path) if network.directory else "",
            ipc=ipc,
            main=_main_key(),
            main_digest=_main_digest(),
            public_key="" if keys is None else keys.public,
            restarts=restarts or 0,
        )
        if world_size is None or restarts is not None:
            card = replace(card, endpoint=listen(network, meeting, keys))
            return _join_running(card, network, meeting, layers)
        cards = meet(store, card, options.init_timeout, meeting.secret)
        membership = Membership(cards, card.rank)
        network.connect(find_endpoints(network, membership, meeting, keys))
        agent = Agent(network, membership, options, store)
    except BaseException:
        network.close(linger=0, lost=())
        raise
    try:
        agent.serve(layers)
    except BaseException:
        agent.close()
        raise
    return agent


def _join_running(
    card: Card,
    network: Network,
    meeting: Meeting,
    layers: Sequence[Callable[[Agent], Layer]],
) -> Agent:
    """Joins a mesh that may run already.

    Raises:
        As `join_mesh`; the network is closed then where there was an agent.
    """
    deadline = time.monotonic() + meeting.options.init_timeout
    roster = Roster()
    try:
        news = News(Entries(meeting.store, meeting.secret))
        card = claim(news, roster, card, deadline)
    except (RuntimeError, OSError) as error:
        if isinstance(error, (RendezvousError, AuthenticationError)):
            raise
        raise store_failed(error) from error
    network.connect_itself(card.number)
    if card.endpoint:
        tell_of_listening(card.info, card.endpoint, bool(card.public_key))
    membership = Membership([card], card.number)
    elastic = not card.world_size
    agent = Agent(network, membership, meeting.options, meeting.store, elastic)
    try:
        agent.serve([*layers, lambda agent: ElasticLayer(agent, news, roster)])
        layer = agent.layer(ElasticLayer)
        layer.start()
        layer.await_admission(deadline, meeting.options.init_timeout)
    except BaseException:
        agent.close()
        with contextlib.suppress(RuntimeError, OSError):
            news.post(Item(Verb.GONE, card.token, why=Departure.LEFT))
        raise
    return agent


def _main_key() -> str:
    """What ``__main__`` is: the same string where the same script or module runs."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return f"-m {spec.name}"
    file = getattr(main, "__file__", None)
    return os.path.realpath(file) if file else f"process {os.getpid()} of {_PROCESS_TOKEN}"


def _main_digest() -> str:
    """A digest of the main script's text; empty where it can't be read."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    if not file:
        return ""
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return ""


_PROCESS_TOKEN = secrets.token_hex(8)

"""Where each worker of a mesh can be reached, and who may connect there.

Workers of one host use Unix sockets. Where any two can't, all listen on one network interface as
well, and tell each other where.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq
from torch.distributed import Store

from zrpc.card import Card
from zrpc.errors import AuthenticationError, RpcError
from zrpc.init_method import master_host
from zrpc.membership import Membership
from zrpc.options import ZmqRpcBackendOptions
from zrpc.rendezvous import exchange
from zrpc.secret import ClusterSecret
from zrpc.transport.address import check_private, interface_towards
from zrpc.transport.curve import Curve, KeyPair, supports_curve
from zrpc.transport.network import Network
from zrpc.worker_info import WorkerInfo

__all__ = ["Meeting", "endpoint_of", "find_endpoints", "listen", "make_keys", "tell_of_listening"]

logger = logging.getLogger(__name__)

_IFACE = "ZRPC_IFACE"
_ALL_INTERFACES = ("*", "0.0.0.0", "::", "[::]", "0")


@dataclass(frozen=True)
class Meeting:
    """Where workers meet, and how.

    Attributes:
        store: shared by all.
        init_method: where that is; empty where it was passed in.
        secret: the cluster's.
        options: this worker's.
    """

    store: Store
    init_method: str
    secret: ClusterSecret | None
    options: ZmqRpcBackendOptions


def make_keys(meeting: Meeting) -> KeyPair | None:
    """This worker's keys; None where it is to talk in the clear, which is told aloud.

    Raises:
        AuthenticationError: there is no secret, though the options require one; libzmq can't
            encrypt.
    """
    security = meeting.options.security
    if security == "none":
        logger.warning(
            "security='none': what goes between hosts is neither encrypted nor authenticated. "
            "Whoever can reach a worker's port can run any code there"
        )
        return None
    if security == "required" and meeting.secret is None:
        raise AuthenticationError(f"security='required' needs a cluster secret: {_WHAT_TO_DO}")
    if not supports_curve():
        raise AuthenticationError(
            "expected a libzmq with CURVE, found one without: install pyzmq from its wheels, or "
            "use security='none' on one host, or in a network that you trust"
        )
    return KeyPair.new()


_WHAT_TO_DO = (
    "make a file with `zrpc secret FILE`, copy it to each host, and set ZRPC_SECRET_FILE to its "
    "path for every worker"
)


def find_endpoints(
    network: Network, membership: Membership, meeting: Meeting, keys: KeyPair | None
) -> list[str]:
    """Where each worker can be reached; listens on tcp where any pair of workers needs that.

    Raises:
        AuthenticationError: a worker's directory or key is not what it must be, or there is no
            secret where there must be one.
        RpcError: a worker can't be reached.
    """
    cards = list(membership.cards.values())
    for card in cards:
        if card.rank != membership.rank and membership.reaches_by_ipc(card.rank):
            check_private(Path(card.directory))
    endpoints = [f"ipc://{Path(card.directory) / 'inbox'}" for card in cards]
    if len(cards) == 1 or _all_by_ipc(cards):
        return endpoints  # a worker reaches itself anyhow
    if meeting.options.transport == "ipc":
        raise RpcError(
            "transport='ipc' needs all workers on one host with one directory for sockets, "
            f"but they are on {_hosts(cards)} hosts, or see different ones"
        )
    _check_security(membership, meeting, keys)
    curve = None if keys is None else Curve(keys, [card.public_key for card in cards])
    tcp = _exchange_tcp(network, membership, meeting, curve)
    return [
        endpoints[card.rank] if membership.reaches_by_ipc(card.rank) else tcp[card.rank]
        for card in cards
    ]


def listen(network: Network, meeting: Meeting, keys: KeyPair | None) -> str:
    """Listens on tcp where workers may come that don't share this host; returns the endpoint.

    For a worker that does not know yet whom it will meet. They may come where the master is
    reached by a network, where an interface is named, and with ``transport="tcp"``.

    Returns:
        The empty string where it does not listen on tcp.

    Raises:
        AuthenticationError: there is no secret where there must be one.
        RpcError: it can't listen.
    """
    transport = meeting.options.transport
    named = bool(os.environ.get(_IFACE, "").strip())
    interface = "127.0.0.1"
    if named or meeting.init_method.startswith(("tcp:", "env:")):
        interface = _interface(meeting.init_method)
    elsewhere = named or not (interface.startswith("127.") or interface == "::1")
    if transport == "ipc" or (transport == "auto" and not elsewhere):
        return ""
    if keys is not None and meeting.secret is None:
        raise AuthenticationError(
            "expected a cluster secret, found none. Workers of other hosts can join this mesh by "
            f"{interface}, and without it can't be told from strangers: {_WHAT_TO_DO}. For workers "
            "of one host only, let them meet at 127.0.0.1"
        )
    return _listen(network, interface, None if keys is None else Curve(keys, []))


def endpoint_of(membership: Membership, card: Card) -> str:
    """Where a worker can be reached that this one has not met before.

    Raises:
        AuthenticationError: the worker's directory or key is not what it must be.
        RpcError: it can't be reached.
    """
    mine = membership.cards[membership.rank]
    if mine.reaches_by_ipc(card):
        check_private(Path(card.directory))
        return f"ipc://{Path(card.directory) / 'inbox'}"
    local = _is_loopback(mine.endpoint) or _is_loopback(card.endpoint)
    if not (mine.endpoint and card.endpoint) or (local and _hosts([mine, card]) > 1):
        deaf = card.info if mine.endpoint and not _is_loopback(mine.endpoint) else mine.info
        raise RpcError(
            f"{mine.info} and {card.info} share no host, or no directory for sockets, and {deaf} "
            f"listens on no network: set {_IFACE} there to the name or the address of the network "
            "interface that leads to the others, or let all meet at an address of a network"
        )
    if bool(mine.public_key) != bool(card.public_key):
        clear, other = (mine, card) if card.public_key else (card, mine)
        raise AuthenticationError(
            f"{clear.info} talks in the clear (security='none'), but {other.info} does not: give "
            "all workers the same security"
        )
    return card.endpoint


def _all_by_ipc(cards: Sequence[Card]) -> bool:
    return all(card.ipc for card in cards) and len({card.host_key for card in cards}) == 1


def _hosts(cards: Iterable[Card]) -> int:
    return len({_system(card) for card in cards})


def _system(card: Card) -> str:
    return card.host_key.partition("/")[0]


def _check_security(membership: Membership, meeting: Meeting, keys: KeyPair | None) -> None:
    """Refuses tcp that is not secured alike, or whose keys nobody vouches for."""
    for card in membership.cards.values():
        if bool(card.public_key) != (keys is not None):
            clear, other = (membership.info, card.info)[:: 1 if keys is None else -1]
            raise AuthenticationError(
                f"{clear} talks in the clear (security='none'), but {other} does not: give all "
                "workers the same security"
            )
    if keys is not None and meeting.secret is None:
        # On one host too: other users of it can reach the store, and pose as a worker there.
        hosts = _hosts(membership.cards.values())
        raise AuthenticationError(
            f"expected a cluster secret, found none. The workers use tcp (they are on "
            f"{hosts} host(s)), and without it can't tell a member from a "
            f"stranger: {_WHAT_TO_DO}. `zrpc launch` makes one for its own workers"
        )


def _exchange_tcp(
    network: Network, membership: Membership, meeting: Meeting, curve: Curve | None
) -> list[str]:
    """Listens on tcp; returns the endpoints of all."""
    cards = list(membership.cards.values())
    mine = _listen(network, _interface(meeting.init_method), curve)
    timeout = meeting.options.init_timeout
    found = exchange(meeting.store, cards, membership.rank, mine, timeout, meeting.secret)
    for card, endpoint in zip(cards, found, strict=True):
        if _is_loopback(endpoint) and _hosts(cards) > 1:
            raise RpcError(
                f"{card.info} listens on {endpoint}, which other hosts can't reach: set {_IFACE} "
                "there to the name or the address of the network interface that leads to them"
            )
    tell_of_listening(membership.info, mine, curve is not None)
    return found


def _listen(network: Network, interface: str, curve: Curve | None) -> str:
    try:
        return network.listen_tcp(interface, curve)
    except zmq.ZMQError as error:
        raise RpcError(
            f"can't listen on {interface} ({error}): set {_IFACE} to the name or the address of a "
            "network interface of this host"
        ) from error


def tell_of_listening(info: WorkerInfo, endpoint: str, curve: bool) -> None:
    """Tells the user where a worker listens on tcp, where that is no secret of this host's."""
    text = f"{info} listens on {endpoint} ({'CURVE' if curve else 'in the clear'})"
    logger.info(text)
    if not _is_loopback(endpoint) and not logger.isEnabledFor(logging.INFO):
        print(f"zrpc: {text}", file=sys.stderr)


def _interface(init_method: str) -> str:
    """The interface to listen on: the one that is named, or that leads to the master."""
    named = os.environ.get(_IFACE, "").strip()
    if named in _ALL_INTERFACES:
        raise RpcError(
            f"expected the name or the address of one network interface in {_IFACE}, found "
            f"{named!r}: a worker never listens on all of them"
        )
    if named:
        return named
    return interface_towards(master_host(init_method) if init_method else "127.0.0.1")


def _is_loopback(endpoint: str) -> bool:
    return endpoint.startswith(("tcp://127.", "tcp://[::1]"))

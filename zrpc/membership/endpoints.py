"""Where each worker of a mesh can be reached, and which workers may connect there.

Workers of one host use Unix sockets. If any two can't, all of them listen on a network interface
too, and publish where.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq
from torch.distributed import Store

from zrpc.errors import AuthenticationError, RpcError
from zrpc.membership.init_method import master_host
from zrpc.membership.peer_record import PeerRecord
from zrpc.membership.secret import ClusterSecret
from zrpc.membership.view import Membership
from zrpc.membership.worker_info import WorkerInfo
from zrpc.options import ZmqRpcBackendOptions
from zrpc.runtime.resource_limits import allow_descriptors
from zrpc.transport.address import check_private, interface_towards
from zrpc.transport.curve import Curve, KeyPair, PeerKey, supports_curve
from zrpc.transport.network import DESCRIPTORS_PER_PEER, Network

logger = logging.getLogger(__name__)

_IFACE = "ZRPC_IFACE"
_ALL_INTERFACES = ("*", "0.0.0.0", "::", "[::]", "0")
# For a worker without others, and files of the program.
_SPARE_DESCRIPTORS = 32
MAKE_A_SECRET = (
    "make a file with `zrpc secret FILE`, copy it to each host, and set ZRPC_SECRET_FILE to its "
    "path for every worker"
)


@dataclass(frozen=True)
class Meeting:
    """Where and how the workers of a mesh meet."""

    store: Store  # shared by all
    init_method: str  # the URL of the store; empty if the store was passed in
    secret: ClusterSecret | None
    options: ZmqRpcBackendOptions  # this worker's
    ports: range | None  # that this worker may listen on; None for all
    keys: KeyPair | None  # this worker's; None if it must not encrypt
    network: Network  # this worker's

    def listen_at(self, interface: str) -> str:
        """Listens on a network interface; returns the endpoint, or raises an RpcError."""
        curve = None if self.keys is None else Curve(self.keys)
        return listen_on(self.network, interface, curve, self.ports)


def make_keys(security: str, secret: ClusterSecret | None) -> KeyPair | None:
    """Returns new keys for this worker; None if it must not encrypt (logged as a warning).

    Raises:
        AuthenticationError: there is no secret, though the options require one; libzmq can't
            encrypt.
    """
    if security == "none":
        logger.warning(
            "security='none': traffic between hosts is neither encrypted nor authenticated. Anyone "
            "who can reach a worker's port can run any code there"
        )
        return None
    if security == "required" and secret is None:
        raise AuthenticationError(f"security='required' needs a cluster secret: {MAKE_A_SECRET}")
    check_curve()
    return KeyPair.new()


def check_curve() -> None:
    """Raises an AuthenticationError if libzmq can't encrypt."""
    if not supports_curve():
        raise AuthenticationError(
            "expected a libzmq with CURVE, found one without: install pyzmq from its wheels, or "
            "use security='none' on one host, or in a network that you trust"
        )


def listen_if_needed(meeting: Meeting, own: PeerRecord, records: list[PeerRecord]) -> str:
    """Listens on tcp for the workers that meet, if any two need that; returns the endpoint, or "".

    May be called again with other records.

    Raises:
        AuthenticationError: the security differs; a secret is missing; a directory can't be
            trusted.
        RpcError: it can't listen; there are too few descriptors.
    """
    needed = not _all_by_ipc(records)
    if needed:
        _check_security(records, meeting)
    neighbours = [each for each in records if each != own and own.reaches_by_ipc(each)]
    for record in neighbours:
        check_private(Path(record.directory))
    check_descriptors(own.info, len(neighbours))
    if not needed:
        return ""
    if meeting.options.transport == "ipc":
        raise RpcError(
            "transport='ipc' needs all workers on one host with one directory for sockets, "
            f"but they are on {_hosts(records)} hosts, or see different ones"
        )
    if not meeting.network.tcp_endpoint:
        meeting.listen_at(choose_interface(meeting.init_method))
    for record in records:
        key = PeerKey(record.public_key, record.identity)
        meeting.network.introduce(record.rank, "", key)
    return meeting.network.tcp_endpoint


def _check_security(records: list[PeerRecord], meeting: Meeting) -> None:
    """Refuses tcp if the workers' security differs, or if no secret vouches for their keys."""
    for record in records:
        _check_same_security(records[0], record)
    if records[0].public_key and meeting.secret is None:
        # On one host too: its other users can reach the store, and pose as a worker there.
        raise AuthenticationError(
            f"expected a cluster secret, found none. The workers use tcp, {_where(records)}. "
            f"Without a secret they can't tell a member from a stranger: {MAKE_A_SECRET}. "
            "`zrpc launch` makes one for its own workers"
        )


def _where(records: Sequence[PeerRecord]) -> str:
    hosts = _hosts(records)
    return f"as they are on {hosts} hosts" if hosts > 1 else "though all of them are on one host"


def check_reachable(records: Sequence[PeerRecord]) -> None:
    """Raises an RpcError if a worker listens where others can't reach it."""
    for record in records:
        if is_loopback(record.endpoint) and _networks(records) > 1:
            raise RpcError(
                f"{record.info} listens on {record.endpoint}, which other hosts and containers "
                f"can't reach: set {_IFACE} there to the name or the address of the network "
                "interface that leads to them (the master's name may mean loopback in its "
                "/etc/hosts)"
            )


def listen(meeting: Meeting) -> str:
    """Listens on tcp if workers of other hosts may join; returns the endpoint, or "" if not.

    For a worker that does not know yet which others it will meet. They may be on other hosts if the
    master is reached by a network, if an interface is named, and with ``transport="tcp"``.

    Raises:
        AuthenticationError: a secret is missing.
        RpcError: it can't listen.
    """
    transport = meeting.options.transport
    named = bool(os.environ.get(_IFACE, "").strip())
    interface = "127.0.0.1"
    if named or meeting.init_method.startswith(("tcp:", "env:")):
        interface = choose_interface(meeting.init_method)
    elsewhere = named or not (interface.startswith("127.") or interface == "::1")
    if transport == "ipc" or (transport == "auto" and not elsewhere):
        return ""
    if meeting.keys is not None and meeting.secret is None:
        raise AuthenticationError(
            "expected a cluster secret, found none. Workers of other hosts can join this mesh by "
            f"{interface}, and without one can't be told from strangers: {MAKE_A_SECRET}. "
            "For workers of one host only, let them meet at 127.0.0.1"
        )
    return meeting.listen_at(interface)


def endpoint_of(membership: Membership, record: PeerRecord) -> str:
    """Returns where a worker can be reached that this one has not met before.

    Raises:
        AuthenticationError: the worker's directory or key can't be trusted.
        RpcError: it can't be reached.
    """
    mine = membership.records[membership.own_id]
    if mine.reaches_by_ipc(record):
        check_private(Path(record.directory))
        return address_of(record, mine)
    local = is_loopback(mine.endpoint) or is_loopback(record.endpoint)
    if not (mine.endpoint and record.endpoint) or (local and _networks([mine, record]) > 1):
        silent = record.info if mine.endpoint and not is_loopback(mine.endpoint) else mine.info
        raise RpcError(
            f"{mine.info} and {record.info} share no host, or no directory for sockets, and "
            f"{silent} listens on no network: set {_IFACE} there to the name or the address of "
            "the network interface that leads to the others, or let all workers meet at a network "
            "address"
        )
    _check_same_security(mine, record)
    return record.endpoint


def address_of(record: PeerRecord, own: PeerRecord) -> str:
    """Returns where a worker can be reached from this one."""
    if own.reaches_by_ipc(record):
        return f"ipc://{Path(record.directory) / 'inbox'}"
    return record.endpoint


def _hosts(records: Iterable[PeerRecord]) -> int:
    return len({record.host_key.partition("/")[0] for record in records})


def check_descriptors(info: WorkerInfo, neighbours: int) -> None:
    """Refuses to be connected to more workers by Unix sockets than there are descriptors for.

    Without them, libzmq would abort the process.
    """
    short = allow_descriptors(neighbours * DESCRIPTORS_PER_PEER + _SPARE_DESCRIPTORS)
    if short is not None:
        peers = f", and {DESCRIPTORS_PER_PEER} more for each other worker on its host"
        if neighbours:
            peers = f" to talk to {neighbours} other worker(s) on its host"
        raise RpcError(
            f"expected a limit of {short[0]} file descriptors or more, which {info} needs{peers}, "
            f"found {short[1]}: raise it with `ulimit -n` before the workers start"
        )


def _networks(records: Iterable[PeerRecord]) -> int:
    """Returns how many loopback interfaces the workers have; containers may have one each."""
    return len({record.network_key for record in records})


def _all_by_ipc(records: Sequence[PeerRecord]) -> bool:
    """Whether no worker needs tcp. One alone never does: a worker always reaches itself."""
    one_directory = len({record.host_key for record in records}) == 1
    return len(records) == 1 or (one_directory and all(record.ipc for record in records))


def _check_same_security(mine: PeerRecord, record: PeerRecord) -> None:
    if bool(mine.public_key) != bool(record.public_key):
        clear, other = (mine, record) if record.public_key else (record, mine)
        raise AuthenticationError(
            f"{clear.info} talks in the clear (security='none'), but {other.info} does not: give "
            "all workers the same security"
        )


def listen_on(network: Network, interface: str, curve: Curve | None, ports: range | None) -> str:
    """Listens on a network interface; returns the endpoint, or raises an RpcError."""
    try:
        return network.listen_tcp(interface, curve, ports)
    except zmq.ZMQError as error:
        if ports is not None and error.errno == zmq.EADDRINUSE:
            raise RpcError(
                f"expected a free TCP port from {ports[0]} to {ports[-1]} on {interface}, found "
                f"all {len(ports)} of them in use: give port_range or ZRPC_PORT_RANGE more ports "
                "(each worker of a host needs one), or stop what uses them"
            ) from error
        if ports is not None and error.errno == errno.EACCES:
            raise RpcError(
                f"can't listen on port {ports[0]} of {interface} ({error}): name ports from 1024 "
                "on in port_range or ZRPC_PORT_RANGE"
            ) from error
        raise RpcError(
            f"can't listen on {interface} ({error}): set {_IFACE} to the name or the address of a "
            "network interface of this host"
        ) from error


def announce_endpoint(info: WorkerInfo, endpoint: str, curve: bool) -> None:
    """Logs where a worker listens on tcp; prints it too if other hosts can reach that."""
    text = f"{info} listens on {endpoint} ({'CURVE' if curve else 'in the clear'})"
    logger.info(text)
    if not is_loopback(endpoint) and not logger.isEnabledFor(logging.INFO):
        print(f"zrpc: {text}", file=sys.stderr)


def choose_interface(init_method: str) -> str:
    """Returns the interface to listen on: the named one, or the one that leads to the master."""
    named = os.environ.get(_IFACE, "").strip()
    if named in _ALL_INTERFACES:
        raise RpcError(
            f"expected the name or the address of one network interface in {_IFACE}, found "
            f"{named!r}: name one, as a worker never listens on all of them"
        )
    if named:
        return named
    return interface_towards(master_host(init_method) if init_method else "127.0.0.1")


def is_loopback(endpoint: str) -> bool:
    """Returns whether only workers with the same loopback interface can reach an endpoint."""
    return endpoint.startswith(("tcp://127.", "tcp://[::1]"))

"""Joins a mesh: rendezvous, addresses, and the start of an agent with all its services."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

from torch.distributed import Store

from zrpc.agent.agent import Agent
from zrpc.agent.service import Service
from zrpc.errors import RendezvousError
from zrpc.membership.device_maps import check_device_maps, own_settings
from zrpc.membership.endpoints import (
    Meeting,
    address_of,
    announce_endpoint,
    check_descriptors,
    check_reachable,
    listen,
    listen_if_needed,
    make_keys,
)
from zrpc.membership.init_method import local_world_size, restart_count
from zrpc.membership.launched import own_environment
from zrpc.membership.peer_record import PeerRecord, own_version
from zrpc.membership.rendezvous import StoreLost, meet
from zrpc.membership.secret import ClusterSecret, find_secret
from zrpc.membership.store import connect_store
from zrpc.membership.view import Membership
from zrpc.membership.worker_info import WorkerInfo
from zrpc.options import ZmqRpcBackendOptions
from zrpc.runtime.green_threads import check_threads
from zrpc.services.actors.service import ActorService
from zrpc.services.agreement import AgreementService
from zrpc.services.autograd.service import AutogradService
from zrpc.services.batching.service import BatchingService
from zrpc.services.collectives import Collectives
from zrpc.services.debugger.service import DebuggerService
from zrpc.services.devices.service import DeviceService
from zrpc.services.elastic.join import join_running
from zrpc.services.elastic.limits import DEFAULT_LIMITS, ElasticLimits
from zrpc.services.groups.service import GroupService
from zrpc.services.inspection.service import InspectionService
from zrpc.services.metrics.service import MetricsService
from zrpc.services.names.service import NameService
from zrpc.services.queue.service import QueueService
from zrpc.services.rref.orders import ActorOrders
from zrpc.services.rref.rref import plug_in as plug_in_rrefs
from zrpc.services.shm.service import SharedMemoryService
from zrpc.services.streams.service import StreamService
from zrpc.services.tracing.service import TracingService
from zrpc.services.weights.service import WeightsService
from zrpc.transport.address import host_key, network_key
from zrpc.transport.network import Network

# What an agent has, in the order in which it is plugged in.
_SERVICES: tuple[Callable[[Agent], Service], ...] = (
    AgreementService,
    SharedMemoryService,
    plug_in_rrefs,
    ActorOrders,
    ActorService,
    NameService,
    GroupService,
    StreamService,
    AutogradService,
    InspectionService,
    Collectives,
    TracingService,
    DebuggerService,
    MetricsService,
    BatchingService,
    QueueService,
    WeightsService,
    DeviceService,
)
_PROCESS_TOKEN = secrets.token_hex(8)
# ZeroMQ's limits are set for an elastic mesh of this size.
_MAX_WORKERS = 4096


def join_by_init_method(
    name: str, rank: int | None, world_size: int | None, options: ZmqRpcBackendOptions
) -> Agent:
    """Connects to the store of the init method, and joins the mesh; tries again if it is lost.

    The store of a mesh that has just shut down may still answer until its host closes it.

    Raises:
        RendezvousError: the store can't be reached, or is still lost after ``init_timeout``
            seconds. For other errors see `join_mesh`.
    """
    check_threads()
    restarts = restart_count(world_size, rank, options.init_method)
    secret = find_secret(own_environment())  # before waiting for others: it may raise
    timeout = options.init_timeout
    deadline = time.monotonic() + timeout
    lost: StoreLost | None = None
    while True:
        left = round(deadline - time.monotonic(), 2)  # errors name it
        try:
            store = connect_store(options.init_method, rank, world_size, max(left, 0.001))
        except RendezvousError as error:
            if lost is None:
                raise
            raise RendezvousError(
                f"expected the mesh within {timeout:g} s, but the store in which this worker was "
                f"waiting for others was lost ({lost}), and then {error}. Either rank 0 has ended "
                "while the workers were meeting, or it was still the store of an earlier mesh"
            ) from error
        store.set_timeout(timedelta(seconds=timeout))
        try:
            return join_mesh(
                name,
                rank=rank,
                world_size=world_size,
                store=store,
                options=options,
                init_method=options.init_method,
                secret=secret,
                restarts=restarts,
            )
        except StoreLost as error:
            if time.monotonic() > deadline:
                raise
            lost = error


def join_mesh(
    name: str,
    *,
    rank: int | None,
    world_size: int | None,
    store: Store,
    options: ZmqRpcBackendOptions | None = None,
    services: Sequence[Callable[[Agent], Service]] = _SERVICES,
    init_method: str = "",
    secret: ClusterSecret | None = None,
    restarts: int | None = None,
    elastic_limits: ElasticLimits = DEFAULT_LIMITS,
    sockets: Path | None = None,
) -> Agent:
    """Meets the other workers and starts an agent that serves them.

    The agent does not become the process's default: one process may have several.

    Args:
        name: this worker's name, unique in the mesh.
        rank: from 0 to ``world_size - 1``, unique in the mesh; None for any free one, if there is
            no world size.
        world_size: the number of workers; None if they come and go.
        store: the store that they all use.
        options: default: those of `ZmqRpcBackendOptions`.
        services: plugged into the agent before it reads the first message.
        init_method: the URL of the store, for the choice of a network interface.
        secret: signs what is written to the store. Default: that of the environment.
        restarts: how often this worker was restarted; None if single workers are not.
        elastic_limits: for a mesh in which workers come and go, or are restarted.
        sockets: the directory for Unix sockets, of all workers of this host. Default: that of
            ``ZRPC_RUNTIME_DIR``, or the temporary one.

    Raises:
        AuthenticationError: the secrets of the workers differ, or can't be used.
        RendezvousError: the others did not arrive within ``options.init_timeout`` seconds, or
            don't fit together.
        OptionError: an environment variable that stands for an option has a wrong value.
        RuntimeError: the name has a form that is not allowed.
    """
    check_threads()
    options = options or ZmqRpcBackendOptions()
    # Raises an error for a wrong range also if no port is needed.
    ports = options.port_range
    secret = secret or find_secret()
    keys = make_keys(options.security, secret)
    check_descriptors(WorkerInfo(name, rank or 0), 0)
    ipc = options.transport != "tcp"
    token = secrets.token_hex(16)
    identity = PeerRecord.identity_of(token)
    network = Network(identity, rank or 0, world_size or _MAX_WORKERS, ipc, sockets)
    meeting = Meeting(store, init_method, secret, options, ports, keys, network)
    try:
        record = PeerRecord(
            name=name,
            rank=-1 if rank is None else rank,
            world_size=world_size or 0,
            token=token,
            host_key=host_key(sockets),
            network_key=network_key(),
            host=socket.gethostname(),
            pid=os.getpid(),
            directory=str(network.directory.path) if network.directory else "",
            ipc=ipc,
            main=_main_key(),
            main_digest=_main_digest(),
            public_key="" if keys is None else keys.public,
            restarts=restarts or 0,
            local_world_size=local_world_size(world_size, init_method),
            devices=own_settings(options).dump(),
            version=own_version(),
            heartbeat_timeout=options.heartbeat_timeout,
        )
        if world_size is None or restarts is not None:
            record = replace(record, endpoint=listen(meeting))
            return join_running(record, meeting, services, elastic_limits)
        return _join_fixed(record, meeting, services)
    except BaseException:
        network.close(linger=0, lost=())
        raise


def _join_fixed(
    record: PeerRecord, meeting: Meeting, services: Sequence[Callable[[Agent], Service]]
) -> Agent:
    """Meets all workers of a mesh of a fixed size; returns this worker's agent."""
    records = meet(
        meeting.store,
        record,
        meeting.options.init_timeout,
        meeting.secret,
        listen=partial(listen_if_needed, meeting, record),
        check=_check,
    )
    own = records[record.rank]
    if own.endpoint:
        announce_endpoint(own.info, own.endpoint, meeting.keys is not None)
    meeting.network.connect([address_of(each, own) for each in records])
    membership = Membership(records, own.member_id)
    agent = Agent(meeting.network, membership, meeting.options, meeting.store)
    try:
        agent.serve(services)
    except BaseException:
        agent.close()
        raise
    return agent


def _check(records: Sequence[PeerRecord]) -> None:
    check_device_maps(records)
    check_reachable(records)


def _main_key() -> str:
    """Identifies ``__main__``: returns the same string if the same script or module runs."""
    main = sys.modules["__main__"]
    if (spec := getattr(main, "__spec__", None)) is not None:
        return f"-m {spec.name}"
    file = getattr(main, "__file__", None)
    return os.path.realpath(file) if file else f"process {os.getpid()} of {_PROCESS_TOKEN}"


def _main_digest() -> str:
    """Returns a digest of the main script's text; empty if it can't be read."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""
    except OSError:
        return ""

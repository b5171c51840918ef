"""Checks of ``zrpc doctor`` that need torch and pyzmq: could a worker start here, and talk?

They call what ``init_rpc`` calls, and report its decisions and its errors.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Iterator

import zmq

from zrpc.constants import DEFAULT_INIT_METHOD
from zrpc.errors import AuthenticationError, RendezvousError, RpcError
from zrpc.membership.endpoints import (
    MAKE_A_SECRET,
    check_curve,
    check_descriptors,
    choose_interface,
    is_loopback,
    listen_on,
)
from zrpc.membership.init_method import (
    master,
    master_host,
    own_settings,
    resolve_name,
    resolve_rank,
)
from zrpc.membership.secret import FILE_VARIABLE, VARIABLE, find_secret
from zrpc.membership.worker_info import WorkerInfo
from zrpc.options import ZmqRpcBackendOptions
from zrpc.services.metrics.address import metrics_address
from zrpc.services.shm.segments import Segment
from zrpc.transport.address import preferred_parent
from zrpc.transport.curve import Curve, KeyPair
from zrpc.transport.network import Network

from .versions import Finding

_SEGMENT_BYTES = 1 << 20
_IFACE_STEP = "set ZRPC_IFACE to the interface or the address that leads to the other hosts"
_MASTER_STEP = (
    "run it as your script is run, such as srun zrpc doctor, or set MASTER_ADDR and MASTER_PORT"
)
_VARIABLES_STEP = "correct that variable, or unset it; `zrpc env` shows where values come from"
_NAME_STEP = "check MASTER_ADDR, and in Kubernetes the pods' subdomain and its headless service"


def check_worker(world_size: int | None) -> Iterator[Finding]:
    """Yields what a worker that started here would find.

    Args:
        world_size: the number of workers; None for what the environment says.
    """
    yield _check_variables()
    yield Finding("libzmq", "ok", zmq.zmq_version())
    curve = _check_curve()
    yield curve
    yield _check_memory()
    network: Network | None = None
    try:
        network = Network(b"zrpc-doctor", 0, 1, ipc=True)
        yield _directory_of(network)
    except RpcError as error:
        yield Finding.of_error("directory", error)
    try:
        encrypts = curve.verdict == "ok"
        interface, elsewhere = _check_interface(network, encrypts)
    finally:
        if network is not None:
            network.close(0, ())
    yield interface
    yield _check_secret(elsewhere)
    yield _check_descriptors(world_size)


def _check_variables() -> Finding:
    """Builds what ``init_rpc`` does of the environment, as far as the program may not pass it."""
    settings = own_settings()
    try:
        options = ZmqRpcBackendOptions()
        found = f"{options.init_timeout:g} s to meet"
        if ports := options.port_range:
            found += f", ports {ports[0]} to {ports[-1]}"
        # A size without a rank is no error yet: the program may pass the rank.
        rank = -1 if "rank" in settings or "world_size" not in settings else 0
        known, size = resolve_rank(DEFAULT_INIT_METHOD, rank, None)
        with contextlib.suppress(RendezvousError):  # neither name nor rank: outside of a launch
            name = resolve_name(None, known, size)
            WorkerInfo(name, known or 0)
            found = f"{name}, {found}"
        metrics_address(os.environ, known or 0)
        if {"master_addr", "master_port"} <= settings.keys():
            master(DEFAULT_INIT_METHOD)
    except (RuntimeError, ValueError) as error:
        return Finding("variables", "failure", str(error), _VARIABLES_STEP)
    return Finding("variables", "ok", found)


def _check_curve() -> Finding:
    try:
        check_curve()
    except AuthenticationError as error:
        return Finding.of_error("CURVE", error)
    return Finding("CURVE", "ok", "libzmq can encrypt")


def _check_memory() -> Finding:
    step = "without it, large tensors between workers of this host are sent by sockets, slower"
    try:
        Segment(0, _SEGMENT_BYTES).close()
    except OSError as error:
        found = f"a memfd can't be made ({error.strerror})"
        advice = f"allow memfd_create in the container's seccomp profile: {step}"
        return Finding("memfd", "warning", found, advice)
    return Finding("memfd", "ok", "large tensors between workers of one host use shared memory")


def _directory_of(network: Network) -> Finding:
    found, wanted = str(network.directory.path.parent), str(preferred_parent())
    if found != wanted:
        found = f"{found}, since {wanted} is too long for the path of a socket, or others can write"
        step = "name a directory in ZRPC_RUNTIME_DIR with a short path that only you can write to"
        return Finding("directory", "warning", found, step)
    return Finding("directory", "ok", found)


def _check_interface(network: Network | None, encrypts: bool) -> tuple[Finding, bool]:
    """Returns the finding, and whether workers of other hosts could reach a worker here."""
    named = os.environ.get("ZRPC_IFACE", "").strip()
    host = ""
    try:
        if not named:
            host = master_host(DEFAULT_INIT_METHOD)
            socket.getaddrinfo(host, None)
        interface = choose_interface(DEFAULT_INIT_METHOD)
        if network is None:
            step = "mend the directory for sockets first"
            return Finding("interface", "warning", f"{interface}, not tried", step), False
        curve = Curve(KeyPair.new()) if encrypts else None
        endpoint = listen_on(network, interface, curve, ZmqRpcBackendOptions().port_range)
    except RendezvousError:  # outside of a launch, nothing is wrong
        return Finding("interface", "warning", "not known without a master", _MASTER_STEP), False
    except RpcError as error:
        return Finding.of_error("interface", error), False
    except (OSError, UnicodeError) as error:
        return Finding(
            "interface", "failure", f"{host!r} has no address ({error})", _NAME_STEP
        ), False
    address = endpoint.removeprefix("tcp://").rpartition(":")[0]
    if not is_loopback(endpoint):
        return Finding("interface", "ok", address), True
    if host == "localhost" or is_loopback(f"tcp://{host}"):
        return Finding("interface", "ok", f"{address}, for workers of this host"), False
    found = f"{address}, to which {named or host} leads: other hosts can't reach it"
    return Finding("interface", "warning", found, _IFACE_STEP), False


def _check_secret(elsewhere: bool) -> Finding:
    try:
        secret = find_secret()
    except AuthenticationError as error:
        return Finding.of_error("secret", error)
    if secret is not None:
        file = os.environ.get(FILE_VARIABLE)
        return Finding("secret", "ok", f"the file {file}" if file else f"in {VARIABLE}")
    if elsewhere:
        return Finding(
            "secret", "warning", "none: workers of other hosts are refused", MAKE_A_SECRET
        )
    return Finding("secret", "ok", "none; workers of one host need none")


def _check_descriptors(world_size: int | None) -> Finding:
    setting = own_settings().get("world_size")
    if world_size is None and setting is not None and setting.value.isdecimal():
        world_size = int(setting.value)
    if world_size is None:
        step = "name the number of workers by --world-size"
        return Finding("descriptors", "ok", f"{_limit()} at most; the world size isn't known", step)
    try:
        check_descriptors(WorkerInfo("worker0", 0), max(0, world_size - 1))
    except RpcError as error:
        return Finding.of_error("descriptors", error)
    found = f"{_limit()} at most, enough for {world_size} worker(s) on this host"
    return Finding("descriptors", "ok", found)


def _limit() -> str:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return "any number" if limit == resource.RLIM_INFINITY else str(limit)

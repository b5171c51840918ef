"""Connects to the store in which the workers of a mesh meet, or hosts it.

It is a ``torch.distributed.Store``, whose kind the ``init_method`` selects.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import socket
import struct
import time
from datetime import timedelta
from socket import SOCK_STREAM
from urllib.parse import urlsplit

from torch.distributed import FileStore, HashStore, Store, TCPStore, rendezvous

from zrpc.errors import RendezvousError
from zrpc.membership.init_method import agent_store, master, own_settings, private_file
from zrpc.membership.store_request import ask, wait_for

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 0.05
_MASTER = {"master_addr", "master_port"}
_NAME_ANOTHER = "Name a port that is free in MASTER_PORT, the same for all workers"
# How long a host may take to reach itself by loopback: other than a network, that needs no time.
_LOOPBACK_SECONDS = 1.0
_BACKLOG = 4096  # a whole mesh may connect at once
_LENGTH = struct.Struct("=I")  # before each key and each value in the file of a FileStore


def connect_store(
    init_method: str, rank: int | None, world_size: int | None, timeout: float
) -> Store:
    """Opens the store that ``init_method`` names; rank 0 hosts it if it needs a host.

    In an elastic mesh (without a world size) rank 0 hosts it only if nobody else does: it may have
    been restarted.

    Raises:
        RendezvousError: the master can't be reached within ``timeout`` seconds, an address is
            missing, or the URL is not understood.
    """
    deadline = time.monotonic() + timeout
    parts = urlsplit(init_method)
    try:
        if parts.scheme == "env" and world_size == 1 and not own_settings().keys() & _MASTER:
            return HashStore()  # nobody else has to find it
        if parts.scheme in ("tcp", "env"):
            address = master(init_method)
            file = private_file(init_method, address, world_size)
            if file is not None and world_size is not None:
                return _file_store(file, world_size, deadline, timeout)
            hosts = rank == 0 and not agent_store(address)
            if hosts and world_size is None:
                hosts = not _listens(address, timeout)
            try:
                return tcp_store(*address, hosts, deadline, timeout)
            except RendezvousError as error:
                if rank is not None or agent_store(address):
                    raise
                raise RendezvousError(
                    f"{error}. The worker of rank 0 hosts the store, and this worker was given no "
                    "rank. Set RANK or pass rank= to init_rpc, unless it joins a running mesh"
                ) from error
        if parts.scheme == "file":
            _check_directory(parts.path)
            size = -1 if world_size is None else world_size
            return _file_store(parts.path, size, deadline, timeout)
        if rank is None or world_size is None:
            raise RendezvousError(
                "expected env://, tcp://host:port or file:///path as the init_method of an elastic "
                f"mesh (without a world size), found {init_method}"
            )
        left = timedelta(seconds=timeout)
        store: Store = next(rendezvous(init_method, rank, world_size, timeout=left))[0]
        return store
    except RendezvousError:
        raise
    except (RuntimeError, ValueError, OSError) as error:
        worker = "a worker" if rank is None else f"worker {rank}"
        known = (
            "" if parts.scheme == "file" else "; expected env://, tcp://host:port or file:///path"
        )
        raise RendezvousError(
            f"{worker} can't use the store of {init_method}: {error}{known}"
        ) from error


def _file_store(path: str, world_size: int, deadline: float, timeout: float) -> Store:
    """Opens the store in a file, once that can be opened and locked.

    FileStore would wait for either without limit, and for what is missing in a file that is cut
    off. It keeps the interpreter's lock meanwhile, so that no other thread could end that wait.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if not wait_for(functools.partial(_locks, file), deadline):
            raise RendezvousError(
                f"expected the file {path}, in which the workers meet, to be free within "
                f"{timeout:g} s, found it locked by another program: end that, or name another file"
            )
        if not _has_entries(file):  # those who write to it hold the lock
            raise RendezvousError(
                f"expected a new or empty file, or one in which workers meet, found {path} with "
                "other contents, or only a part of them (is the disk full?): remove it, or name "
                "another file"
            )
    finally:
        os.close(file)  # and unlocks it
    return FileStore(path, world_size)


def _locks(file: int) -> bool:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _has_entries(file: int) -> bool:
    """Returns whether a file is what FileStore writes: keys and values, each after its length."""
    end, at, count = os.fstat(file).st_size, 0, 0
    while at < end:
        length = os.pread(file, _LENGTH.size, at)
        if len(length) < _LENGTH.size:
            return False
        at += _LENGTH.size + _LENGTH.unpack(length)[0]
        count += 1
    return at == end and count % 2 == 0


def _check_directory(path: str) -> None:
    directory = os.path.dirname(path) or "/"
    if not os.access(directory, os.W_OK | os.X_OK):
        raise RendezvousError(
            f"expected a writable directory for the file {path}, found none: make {directory}, or "
            "name another place"
        )


def _listens(address: tuple[str, int], timeout: float) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(address, timeout):
        return True
    return False


def tcp_store(host: str, port: int, hosts: bool, deadline: float, timeout: float) -> Store:
    """Connects to the TCPStore at an address, which rank 0 or the launcher hosts.

    Made here and not by torch's ``rendezvous``, in which rank 0 waits for all others and then
    does not name the missing ones.
    """
    if not hosts:
        _await_listener((host, port), deadline, timeout)
    left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    until = time.monotonic() + left.total_seconds() + 1.0
    try:
        # If something else listens at that address, TCPStore waits for an answer without limit.
        return ask(functools.partial(_make_store, host, port, hosts, left), until, errors=False)
    except RendezvousError as error:
        raise _failure(host, port, hosts, timeout, "") from error
    except RuntimeError as error:  # a DistNetworkError; torch 2.6 raises plain ones too
        text = str(error).partition("\n")[0]
        raise _failure(host, port, hosts, timeout, f" ({text})") from error
    except socket.gaierror as error:
        raise _unknown_host(host, port, timeout, error) from error


def _make_store(host: str, port: int, hosts: bool, timeout: timedelta) -> TCPStore:
    listener = open_listener(host, port) if hosts else None
    if hosts and port:
        try:
            _check_reach(host, port, listener is not None, timeout.total_seconds())
        except BaseException:
            if listener is not None:
                os.close(listener)
            raise
    make = functools.partial(
        TCPStore,
        host,
        port,
        None,
        hosts,
        timeout,
        wait_for_workers=False,
        multi_tenant=not agent_store((host, port)),
        master_listen_fd=listener,
    )
    try:
        return make()
    except NotImplementedError:  # older torch's store takes a listener only without libuv
        return make(use_libuv=False)


def _check_reach(host: str, port: int, listens: bool, timeout: float) -> None:
    """Raises a RuntimeError if this host does not reach itself at the master's address.

    TCPStore tries for longer than its timeout, in C++ code. If the program exits meanwhile, it may
    be aborted.
    """
    with contextlib.ExitStack() as stack:
        if not listens:
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            try:
                server = socket.create_server(("", port), family=family, dualstack_ipv6=both)
            except OSError:
                return  # in use, maybe by another store of this process
            stack.enter_context(server)
        if _is_loopback(host):
            timeout = min(timeout, _LOOPBACK_SECONDS)
        try:
            _await_listener((host, port), time.monotonic() + timeout, timeout)
        except RendezvousError as error:
            raise RuntimeError(str(error.__cause__)) from error


def _failure(host: str, port: int, hosts: bool, timeout: float, found: str) -> RendezvousError:
    """Returns the error for a store that can't be used, with what TCPStore says, if anything."""
    if not hosts:
        return RendezvousError(
            f"expected the store of rank 0 at {host}:{port} within {timeout:g} s, found "
            f"something that does not answer as one{found}: another program has that port, "
            f"or the host is stopped. {_NAME_ANOTHER}"
        )
    if "EADDRINUSE" not in found and _is_loopback(host):
        return RendezvousError(
            f"expected to host the store of the workers at {host}:{port}, found that this host "
            f"does not reach itself there{found}: its loopback interface must be up (`ip link set "
            "lo up`), and open to itself"
        )
    if "EADDRINUSE" not in found:
        return RendezvousError(
            f"expected to host the store of the workers at {host}:{port}, and to reach it "
            f"there within {timeout:g} s, found that this process does not{found}: MASTER_ADDR, or "
            "the launcher's --listen, must be an address of the host of the store (rank 0's, or "
            "the launcher's), which no firewall keeps from itself"
        )
    return RendezvousError(
        f"expected to host the store of the workers at {host}:{port}, found that address in "
        "use: by another program, by another mesh, or by another worker of rank 0. "
        f"{_NAME_ANOTHER}, and give each worker a rank of its own"
    )


def open_listener(host: str, port: int) -> int | None:
    """Listens for the store at the master's address only; returns the descriptor.

    Returns:
        None if that address is not this host's own, as behind a translating router, or is in use:
        then TCPStore listens on all interfaces, or raises the error.
    """
    found = {info[4][0]: info[0] for info in socket.getaddrinfo(host, port, type=SOCK_STREAM)}
    loopback = [address for address in found if str(address).startswith(("127.", "::1"))]
    if host == "localhost" and "127.0.0.1" in found:
        address = "127.0.0.1"
    elif len(found) == 1 and (host in found or not loopback):
        [address] = map(str, found)
    else:  # unclear which one the others use: a name of this host may mean loopback only here
        return None
    listener = socket.socket(found[address], SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        logger.info("the store does not listen on %s:%d alone: %s", address, port, error)
        return None
    return listener.detach()


def _is_loopback(host: str) -> bool:
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(address.startswith("127.") or address == "::1" for address in found)


def _await_listener(address: tuple[str, int], deadline: float, timeout: float) -> None:
    """Waits until something listens at the master's address.

    TCPStore can wait for that itself, but Ctrl-C would not end it, and it logs an error with a
    stack of C++ frames for each attempt.
    """
    reason: OSError | None = None
    while True:
        left = deadline - time.monotonic()
        if left <= 0 and reason is not None:
            raise _unreachable(*address, timeout, reason) from reason
        try:
            socket.create_connection(address, max(left, _RETRY_SECONDS)).close()
            return
        except OSError as error:
            reason = error
            time.sleep(_RETRY_SECONDS)  # there is no event for the start of a listener


def _unreachable(host: str, port: int, timeout: float, reason: OSError) -> RendezvousError:
    """Returns the error for an address at which nothing listens."""
    if isinstance(reason, socket.gaierror):
        return _unknown_host(host, port, timeout, reason)
    found, advice = f"nobody ({reason})", "start it, or check MASTER_ADDR and MASTER_PORT"
    if not isinstance(reason, ConnectionError):
        found = f"no answer ({reason})"
        advice = (
            "check MASTER_ADDR, that this host has a route there, and that firewalls on the way "
            f"let TCP port {port} pass"
        )
    return RendezvousError(
        f"expected the master (rank 0) at {host}:{port} within {timeout:g} s, found {found}: "
        f"{advice}"
    )


def _unknown_host(host: str, port: int, timeout: float, error: socket.gaierror) -> RendezvousError:
    return RendezvousError(
        f"expected the master (rank 0) at {host}:{port} within {timeout:g} s, found no host of "
        f"that name ({error.strerror}): check MASTER_ADDR, and that name servers know it on each "
        "host"
    )

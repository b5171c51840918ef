"""Where the workers of a mesh meet, and which rank and name this worker has.

They come from the arguments of ``init_rpc``, from the URL ``init_method``, or else from the
environment variables of what started this worker: see `zrpc.membership.cluster_environment`.
"""

from __future__ import annotations

import logging
import operator
import os
import socket
from typing import SupportsIndex
from urllib.parse import urlsplit

from zrpc.errors import RendezvousError
from zrpc.membership.cluster_environment import (
    FULL_HOST_NAME,
    Setting,
    find_settings,
    looked_for,
)
from zrpc.membership.launched import launched, own_environment
from zrpc.membership.peer_record import PeerRecord
from zrpc.wire.member_id import RANKS

logger = logging.getLogger(__name__)

_LAST_PORT = 65_535

# Set by `zrpc launch`.
_WORKER_NAME = "ZRPC_WORKER_NAME"
# Set by torchrun, and by `zrpc launch` if it restarts workers.
_RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
# Set by `zrpc launch` alone, if it starts all workers of the mesh: a directory of mode 0700.
_STORE_DIRECTORY = "ZRPC_STORE_DIR"
_OWN_HOST = ("localhost", "127.0.0.1")
# Set by `zrpc launch` alone: how often a worker may be restarted while the others go on.
_MAX_RESTARTS = "ZRPC_MAX_RESTARTS"
# Set by torchrun and `zrpc launch`, Open MPI, and MPICH.
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def own_variables() -> dict[str, str]:
    """Returns the environment of this process, and the host's full name if that may be needed."""
    variables = own_environment()
    # Only if it gives the master, as it may ask a name server.
    if variables.get("JOB_COMPLETION_INDEX") and not variables.get("MASTER_ADDR"):
        variables[FULL_HOST_NAME] = socket.getfqdn()
    return variables


def own_settings() -> dict[str, Setting]:
    """Returns what the environment says of this worker's rank and of the master."""
    return find_settings(own_variables())


def resolve_rank(
    init_method: str, rank: int, world_size: int | None
) -> tuple[int | None, int | None]:
    """Returns the rank and the world size: from the arguments, the URL, or the environment.

    Without a world size the mesh is elastic, and the rank is optional too.

    Raises:
        RendezvousError: there is a world size and no rank, or one of them isn't a number.
        ValueError: they don't fit together.
        TypeError: one of the arguments isn't an int.
    """
    query = dict(
        part.split("=", 1) for part in urlsplit(init_method).query.split("&") if "=" in part
    )
    settings = find_settings(os.environ)  # the rank doesn't depend on the host's name
    values: dict[str, int | None] = {}
    for name, given in (("rank", rank), ("world_size", world_size)):
        if isinstance(given, bool) or not (given is None or isinstance(given, SupportsIndex)):
            raise TypeError(
                f"expected an int as {name}, but got {given!r} of type {type(given).__name__}: "
                "leave it out if it is in the environment, or convert it by int()"
            )
        if given is None or given < 0:
            found_in = settings.get(name, Setting("", name.upper()))
            if name in query:
                found_in = Setting(query[name].strip(), init_method)
            try:
                given = int(found_in.value) if found_in.value else None
            except ValueError:
                raise RendezvousError(
                    f"expected a number as {name}, found {found_in.value!r} in {found_in.source}"
                ) from None
        values[name] = None if given is None else operator.index(given)
    found, size = values["rank"], values["world_size"]
    if size is not None and found is None:
        raise RendezvousError(
            "expected a rank, found none: pass rank= to init_rpc, or set the environment variable "
            "RANK (`zrpc launch` and torchrun do), or start it by srun or mpirun; "
            + looked_for(own_variables(), "rank")
        )
    limit = RANKS if size is None else size
    if limit < 1 or not 0 <= (found or 0) < limit:
        raise ValueError(
            f"expected a rank from 0 to {'world_size' if size is not None else RANKS} - 1, but got "
            f"rank={found} and world_size={size}"
        )
    if size is None and "rank" in settings and os.environ.get(_AGENT_STORE) != "True":
        logger.warning(
            f"{settings['rank'].source} is set and WORLD_SIZE is not, so this mesh is elastic: "
            "workers join and leave, and none waits for the others. If their number is fixed, set "
            "WORLD_SIZE"
        )
    return found, size


def resolve_name(
    name: str | None, rank: int | None, world_size: int | None = None, init_method: str = "env://"
) -> str:
    """Returns the worker's name: as given, from the environment, or by its rank.

    Raises:
        RendezvousError: there is none of these.
    """
    found = name
    if found is None:
        of_launch = launched()
        is_worker = of_launch.is_worker(_address(init_method), world_size, rank)
        found = of_launch.get(_WORKER_NAME, is_worker) or None
    if found is None and rank is None:
        raise RendezvousError(
            "expected a name or a rank, found neither: start the program with `zrpc launch -n 2 "
            "SCRIPT`, torchrun, srun or mpirun, let it start its workers with zrpc.start_mesh, set "
            f"RANK and WORLD_SIZE or {_WORKER_NAME}, or pass a name to init_rpc; "
            + looked_for(own_variables(), "rank", "world_size")
        )
    return f"worker{rank}" if found is None else found


def restart_count(
    world_size: int | None, rank: int | None = None, init_method: str = "env://"
) -> int | None:
    """Returns how often this worker was restarted; None in a mesh without single restarts.

    `zrpc launch --max-restarts` sets torchrun's variable. torchrun itself restarts all workers
    together, and they meet in a new mesh.
    """
    of_launch, address = launched(), _address(init_method)
    restarts = of_launch.get(_MAX_RESTARTS, of_launch.is_mesh(address, world_size))
    if world_size is not None and not restarts:
        return None
    is_worker = of_launch.is_worker(address, world_size, rank)
    text = of_launch.get(_RESTART_COUNT, is_worker) or "0"
    if not text.isdecimal():
        raise RendezvousError(f"expected a number in {_RESTART_COUNT}, found {text!r}")
    return int(text)


def own_variable(name: str, own: PeerRecord) -> str:
    """Returns a variable; nothing if `zrpc launch` has made it for another worker than this one.

    How the worker has met the others isn't known any more. So a mesh that was told by an argument
    where to meet may be taken for that of the launcher, if it has the same rank and size.
    """
    of_launch = launched()
    return of_launch.get(
        name, of_launch.is_worker(_address("env://"), own.world_size or None, own.rank)
    )


def local_world_size(world_size: int | None, init_method: str = "env://") -> int:
    """Returns how many workers of the mesh this host has; 0 if the engine doesn't say."""
    of_launch = launched()
    is_mesh = of_launch.is_mesh(_address(init_method), world_size)
    for name in _LOCAL_SIZES:
        if (text := of_launch.get(name, is_mesh).strip()).isdecimal():
            return int(text)
    return 0


def agent_store(address: tuple[str, int] | None) -> bool:
    """Whether the launcher hosts the store at the master's address, and not rank 0."""
    of_launch = launched()
    return of_launch.get(_AGENT_STORE, of_launch.is_at(address)) == "True"


def hosted_by_rank_0(init_method: str) -> bool:
    """Whether rank 0 hosts the store of an elastic mesh."""
    by_address = urlsplit(init_method).scheme in ("tcp", "env")
    return by_address and not agent_store(_address(init_method))


def _address(init_method: str) -> tuple[str, int] | None:
    """Returns the host and port that the workers meet at, if they do and both are known."""
    if urlsplit(init_method).scheme not in ("tcp", "env"):
        return None
    try:
        return master(init_method)
    except RendezvousError:
        return None


def master_host(init_method: str) -> str:
    """Returns the host that the workers meet at, for the choice of an interface."""
    if urlsplit(init_method).scheme in ("tcp", "env"):
        return master(init_method)[0]
    return socket.gethostname()


def master(init_method: str) -> tuple[str, int]:
    """Returns the host and port that the workers meet at, for ``tcp://`` and ``env://``.

    Raises:
        RendezvousError: one of them is missing.
    """
    parts = urlsplit(init_method)
    if parts.scheme == "tcp":
        host, port = parts.hostname or "", str(parts.port or "")
        source = init_method
    else:
        settings = own_settings()
        host, port = (
            settings[name].value if name in settings else ""
            for name in ("master_addr", "master_port")
        )
        source = f"host {host!r} and port {port!r}"
        host = host.removeprefix("[").removesuffix("]")  # an IPv6 address, as in a URL
    if not host or not port.isdecimal():
        text = looked_for(own_variables(), "master_addr", "master_port")
        raise RendezvousError(
            f"expected the host and port of the master, found {source}: set the environment "
            "variables MASTER_ADDR and MASTER_PORT (`zrpc launch` and torchrun do), or use "
            "init_method='tcp://host:port'; a program that starts its workers itself joins them by "
            "zrpc.start_mesh" + ("" if parts.scheme == "tcp" else f"; {text}")
        )
    if int(port) > _LAST_PORT:  # in a URL, it is no port at all
        raise RendezvousError(f"expected a port up to {_LAST_PORT} in MASTER_PORT, found {port}")
    return host, int(port)


def private_file(init_method: str, address: tuple[str, int], world_size: int | None) -> str | None:
    """Returns the file in which the workers of one launcher meet, or None if they don't.

    Other users can't reach it, as they can reach a port. The port is part of its name, because a
    program that sets another one begins another mesh; so is another size, as that of a mesh of some
    of the workers. If both are others than the launcher's, processes that it has not started may
    be in the mesh, and they can't see the file.
    """
    of_launch = launched()
    is_seen = of_launch.is_at(address) or of_launch.has_size(world_size)
    directory = of_launch.get(_STORE_DIRECTORY, is_seen)
    host, port = address
    if not directory or host not in _OWN_HOST or agent_store(address):
        return None
    if urlsplit(init_method).scheme != "env":
        return None
    is_other = bool(of_launch.made) and not of_launch.has_size(world_size)
    other_size = f"-{world_size}" if is_other else ""
    return os.path.join(directory, f"store-{port}{other_size}")

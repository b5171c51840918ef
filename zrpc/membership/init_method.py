"""Where the workers of a mesh meet, and which rank and name this worker has.

They come from the arguments of ``init_rpc``, from the URL ``init_method``, or else from environment
variables, which `zrpc launch` and torchrun set.
"""

from __future__ import annotations

import logging
import operator
import os
import socket
from typing import SupportsIndex
from urllib.parse import urlsplit

from zrpc.errors import RendezvousError
from zrpc.wire.member_id import RANKS

__all__ = ["agent_store", "master", "master_host", "resolve_name", "resolve_rank", "restart_count"]

logger = logging.getLogger(__name__)

# Set by `zrpc launch`.
_WORKER_NAME = "ZRPC_WORKER_NAME"
# Set by torchrun, and by `zrpc launch` if it restarts workers.
_RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
# Set by `zrpc launch` alone: how often a worker may be restarted while the others go on.
_MAX_RESTARTS = "ZRPC_MAX_RESTARTS"


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
    values: dict[str, int | None] = {}
    for name, given in (("rank", rank), ("world_size", world_size)):
        if not (given is None or isinstance(given, SupportsIndex)):
            raise TypeError(
                f"expected an int as {name}, but got {given!r} of type {type(given).__name__}: "
                "leave it out if it is in the environment, or convert it by int()"
            )
        if given is None or given < 0:
            text = query.get(name, os.environ.get(name.upper(), "")).strip()
            try:
                given = int(text) if text else None
            except ValueError:
                raise RendezvousError(f"expected a number as {name}, found {text!r}") from None
        values[name] = None if given is None else operator.index(given)
    found, size = values["rank"], values["world_size"]
    if size is not None and found is None:
        raise RendezvousError(
            "expected a rank, found none: pass rank= to init_rpc, or set the environment variable "
            "RANK (`zrpc launch` and torchrun do)"
        )
    limit = RANKS if size is None else size
    if limit < 1 or not 0 <= (found or 0) < limit:
        raise ValueError(
            f"expected a rank from 0 to {'world_size' if size is not None else RANKS} - 1, but got "
            f"rank={found} and world_size={size}"
        )
    if size is None and os.environ.get("RANK") and not agent_store():
        logger.warning(
            "RANK is set and WORLD_SIZE is not, so this mesh is elastic: workers join and leave, "
            "and none waits for the others. If their number is fixed, set WORLD_SIZE"
        )
    return found, size


def resolve_name(name: str | None, rank: int | None) -> str:
    """Returns the worker's name: as given, from the environment, or by its rank.

    Raises:
        RendezvousError: there is none of these.
    """
    found = name if name is not None else os.environ.get(_WORKER_NAME)
    if found is None and rank is None:
        raise RendezvousError(
            "expected a name or a rank, found neither: start the program with `zrpc launch -n 2 "
            f"SCRIPT` or torchrun, set RANK and WORLD_SIZE or {_WORKER_NAME}, or pass a name to "
            "init_rpc"
        )
    return f"worker{rank}" if found is None else found


def restart_count(world_size: int | None) -> int | None:
    """Returns how often this worker was restarted; None in a mesh without single restarts.

    `zrpc launch --max-restarts` sets torchrun's variable. torchrun itself restarts all workers
    together, and they meet in a new mesh.
    """
    if world_size is not None and not os.environ.get(_MAX_RESTARTS):
        return None
    text = os.environ.get(_RESTART_COUNT, "") or "0"
    if not text.isdecimal():
        raise RendezvousError(f"expected a number in {_RESTART_COUNT}, found {text!r}")
    return int(text)


def agent_store() -> bool:
    """Whether the launcher hosts the store at the master's address, and not rank 0."""
    return os.environ.get(_AGENT_STORE) == "True"


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
        host, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
        source = f"MASTER_ADDR={host!r} and MASTER_PORT={port!r}"
    if not host or not port.isdecimal():
        raise RendezvousError(
            f"expected the host and port of the master, found {source}: set the environment "
            "variables MASTER_ADDR and MASTER_PORT (`zrpc launch` and torchrun do), or use "
            "init_method='tcp://host:port'"
        )
    return host, int(port)

"""Where the workers of a mesh meet, and which of them this one is, by ``init_method`` and the rest.

What is not said by the arguments of ``init_rpc`` or in the URL is in environment variables, which
`zrpc launch` and torchrun set.
"""

from __future__ import annotations

import operator
import os
import socket
from typing import SupportsIndex
from urllib.parse import urlsplit

from zrpc.errors import RendezvousError
from zrpc.worker_info import RANKS

__all__ = ["agent_store", "master", "master_host", "resolve_rank", "restart_count"]

# What torchrun, and `zrpc launch` where it restarts workers, say by the environment.
_RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
# Set by `zrpc launch` alone: how often a worker may be started again by itself.
_MAX_RESTARTS = "ZRPC_MAX_RESTARTS"


def resolve_rank(
    init_method: str, rank: int, world_size: int | None
) -> tuple[int | None, int | None]:
    """The rank and the world size: from the arguments, the URL, or the environment.

    Without a world size the mesh is elastic, and there need be no rank either.

    Raises:
        RendezvousError: there is a world size and no rank, or something that is no number.
        ValueError: they don't fit together.
        TypeError: one of the arguments is no int.
    """
    query = dict(
        part.split("=", 1) for part in urlsplit(init_method).query.split("&") if "=" in part
    )
    values: dict[str, int | None] = {}
    for name, given in (("rank", rank), ("world_size", world_size)):
        if not (given is None or isinstance(given, SupportsIndex)):
            raise TypeError(
                f"expected an int as {name}, but got {given!r} of type {type(given).__name__}: "
                "leave it out where it is in the environment, or convert it by int()"
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
    return found, size


def restart_count(world_size: int | None) -> int | None:
    """How often this worker was started again; None in a mesh in which nobody is.

    `zrpc launch --max-restarts` says it in the environment, by torchrun's variable. torchrun itself
    starts all workers again together, which then meet anew.
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
    """The host that the workers meet at, for the choice of an interface."""
    if urlsplit(init_method).scheme in ("tcp", "env"):
        return master(init_method)[0]
    return socket.gethostname()


def master(init_method: str) -> tuple[str, int]:
    """The host and port that the workers meet at, for ``tcp://`` and ``env://``.

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

"""The address of a worker's metrics page. Imports neither torch nor zmq."""

from __future__ import annotations

from collections.abc import Mapping

from zrpc.errors import OptionError

METRICS_PORT = "ZRPC_METRICS_PORT"
_LOOPBACK = "127.0.0.1"
_MAX_PORT = 65535


def metrics_address(env: Mapping[str, str], rank: int) -> tuple[str, int] | None:
    """Returns the address and the port for a worker's page; None if it isn't asked for.

    The variable has the form ``PORT`` or ``ADDRESS:PORT``. To the port ``LOCAL_RANK`` is added, or
    if that isn't set the rank, so that each worker of a host has a port of its own.

    Raises:
        OptionError: the variable has another form, or the sum is no port.
    """
    text = env.get(METRICS_PORT)
    if not text:
        return None
    address, _, number = text.rpartition(":")
    local_rank = env.get("LOCAL_RANK", "")
    if number.isdecimal():
        port = int(number) + (int(local_rank) if local_rank.isdecimal() else rank)
        if int(number) > 0 and port <= _MAX_PORT:
            return address.strip("[]") or _LOOPBACK, port
    raise OptionError(
        f"expected PORT or ADDRESS:PORT in {METRICS_PORT}, with a port for each worker between 1 "
        f"and {_MAX_PORT}, but got {text!r} on the worker with rank {rank}"
    )

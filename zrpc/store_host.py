"""The process that hosts the store of a mesh beside its workers; the launcher starts it."""

from __future__ import annotations

import os
import signal
import struct
import time

from zrpc.entries import Entries
from zrpc.errors import RpcError
from zrpc.news import take_ranks
from zrpc.store import tcp_store

__all__ = ["serve"]

# Seconds for the store to be there.
_CONNECTS_WITHIN = 30.0
_FIRST = struct.Struct("=q")  # as `zrpc.launch.store` reads it


def serve(host: str, port: int, hosts: bool, nprocs: int, report: int) -> None:
    """Host a store, or ask one for ranks. In a process of its own, until it is killed.

    Args:
        host: Where.
        port: Likewise.
        hosts: Whether to host the store, and not to end.
        nprocs: How many ranks to ask for.
        report: The descriptor to which the first of them is written.
    """
    try:
        deadline = time.monotonic() + _CONNECTS_WITHIN
        store = tcp_store(host, port, hosts, deadline, _CONNECTS_WITHIN)
        first = take_ranks(Entries(store, None), nprocs)
    except (RpcError, RuntimeError, OSError) as error:
        raise SystemExit(f"zrpc launch: {error}") from error
    os.write(report, _FIRST.pack(first))
    os.close(report)
    while hosts:
        signal.pause()

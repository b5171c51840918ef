"""The process that hosts the store of a mesh beside its workers; the launcher starts it."""

from __future__ import annotations

import os
import signal
import struct
import time

from zrpc.errors import RpcError
from zrpc.membership.signed_store import SignedStore, take_ranks
from zrpc.membership.store import tcp_store
from zrpc.options import ZmqRpcBackendOptions

_FIRST = struct.Struct("=q")  # as `zrpc.launch.store` reads it


def serve(host: str, port: int, hosts: bool, nprocs: int, report: int) -> None:
    """Hosts a store until this process is killed, or only asks one for ranks.

    The first of the ``nprocs`` ranks is written to the descriptor ``report``. A store on another
    host is waited for as long as `zrpc.init_rpc` waits by default: ZRPC_INIT_TIMEOUT changes both.
    """
    try:
        timeout = ZmqRpcBackendOptions().init_timeout
        deadline = time.monotonic() + timeout
        store = tcp_store(host, port, hosts, deadline, timeout)
        first = take_ranks(SignedStore(store, None, deadline), nprocs)
    except (RpcError, RuntimeError, OSError) as error:
        raise SystemExit(f"zrpc launch: {error}") from error
    os.write(report, _FIRST.pack(first))
    os.close(report)
    while hosts:
        signal.pause()

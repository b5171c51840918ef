"""A firewall that refuses connections, as opposed to one that drops their packets."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.partitions.network import Path, address_of, connected
from tests.transport.two_hosts import Host
from zrpc.membership.secret import new_secret

PORT = 29_400

ONE_WAY = """
import os, pathlib, time
import zrpc

rank = int(os.environ["RANK"])
options = zrpc.ZmqRpcBackendOptions(init_timeout=15, heartbeat_timeout=2)
zrpc.init_rpc(f"w{rank}", rpc_backend_options=options)
try:
    zrpc.rpc_sync(f"w{1 - rank}", max, (1, 2), timeout=0)
except zrpc.WorkerDied as error:
    print("WorkerDied:", error)
# Once w1 has left, the reason that w0 finds would be that its process has ended.
told = pathlib.Path(os.environ["TOLD"])
if rank == 0:
    told.touch()
for _ in range(600):
    if told.exists():
        break
    time.sleep(0.05)
zrpc.shutdown()
"""


def test_a_firewall_that_refuses_all_but_the_port_of_the_master(
    start_workers: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Both are told, with the address, and the shutdown of both ends."""
    with connected(2, PORT) as (names, switch):
        switch.set(Path.REFUSED, 1, 0)
        hosts = [Host(name, tmp_path_factory.mktemp("host")) for name in names]
        env = {
            "ZRPC_SECRET": new_secret(),
            "MASTER_ADDR": address_of(0),
            "MASTER_PORT": str(PORT),
            "TOLD": str(tmp_path_factory.mktemp("told") / "told"),
        }
        workers = start_workers(hosts, ONE_WAY, env, env)
        (code, output), (other_code, other_output) = workers.outcomes()
    assert (code, other_code) == (0, 0), output + other_output
    address = re.search(r"listens on (tcp://\S+)", output)
    assert address
    assert "WorkerDied: worker w1 (rank 1) is gone: it could not connect to this worker" in output
    assert f"it has tried {address[1]}, where this worker listens" in output
    refused = f"or a firewall refuses connections to it at {address[1]}"
    assert refused in other_output

"""Two hosts with a network between them that is interrupted."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.partitions.network import Path as Way
from tests.partitions.network import address_of, connected
from tests.support.waiting import until
from tests.transport.two_hosts import SOON, Host
from zrpc.membership.secret import new_secret

PORT = 29_500

PROGRAM = """
import json, os, time
import zrpc

rank = int(os.environ["RANK"])
peer = f"w{1 - rank}"

def tell(what):
    open(f"{what}{rank}.new", "w").close()
    os.rename(f"{what}{rank}.new", f"{what}{rank}")

def await_word(what):
    end = time.monotonic() + 30
    while not os.path.exists(what):
        assert time.monotonic() < end, what
        time.sleep(0.01)

zrpc.init_rpc(f"w{rank}", rpc_backend_options=zrpc.ZmqRpcBackendOptions(
    init_timeout=15, rpc_timeout=25, heartbeat_timeout=10))
assert zrpc.rpc_sync(peer, max, (1, 2)) == 2
assert zrpc.agent.current.current_agent().membership.records[rank].public_key  # CURVE
ran = []

def note(i):
    import __main__
    __main__.ran.append(i)
    return -i

tell("ready")
await_word("cut")
futures = [zrpc.rpc_async(peer, note, (i,)) for i in range(200)]
tell("sent")
first = futures[0].wait()
tell("answered")
assert [first, *(future.wait() for future in futures[1:])] == [-i for i in range(200)]
zrpc.shutdown()
assert sorted(ran) == list(range(200)), ran  # once each
"""


BLACK_HOLE = """
import os, time
import zrpc

rank = int(os.environ["RANK"])
zrpc.init_rpc(f"w{rank}", rpc_backend_options=zrpc.ZmqRpcBackendOptions(init_timeout=15))
assert zrpc.rpc_sync(f"w{1 - rank}", max, (1, 2)) == 2
open(f"ready{rank}", "w").close()
if rank == 0:
    end = time.monotonic() + 30
    while not os.path.exists("cut"):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert zrpc.rpc_sync("w1", max, (1, 2)) == 2
    try:
        zrpc.rpc_sync("w1", len, (bytes(100_000),), timeout=12)
    except zrpc.RpcTimeoutError as error:
        print(error)
    open("seen", "w").close()
end = time.monotonic() + 60
while not os.path.exists("seen"):
    assert time.monotonic() < end
    time.sleep(0.01)
zrpc.shutdown(graceful=False)
"""


def test_large_packets_that_are_lost_are_reported(
    start_workers: Callable[..., Any],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with connected(2, PORT) as (names, switch):
        hosts = [Host(name, tmp_path_factory.mktemp("host")) for name in names]
        env = {
            "ZRPC_SECRET": new_secret(),
            "MASTER_ADDR": address_of(0),
            "MASTER_PORT": str(PORT),
        }
        workers = start_workers(hosts, BLACK_HOLE, env, env)
        ready = [tmp_path / f"ready{rank}" for rank in range(2)]
        until(lambda: all(each.exists() for each in ready), within=SOON)
        switch.set(Way.LARGE_LOST, 0, 1)
        (tmp_path / "cut").touch()
        for code, output in workers.outcomes():
            assert code == 0, output
        output = workers.output(0)
        said = f"large packets do not reach w1 (rank 1) at tcp://{address_of(1)}:"
        assert output.count(said) == 2, output  # in the log, and in the error
        assert "MTU" in output


def test_a_short_interruption_loses_nothing(
    start_workers: Callable[..., Any],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    def await_both(what: str) -> None:
        until(lambda: all((tmp_path / f"{what}{rank}").exists() for rank in range(2)), within=SOON)

    with connected(2, PORT) as (names, switch):
        hosts = [Host(name, tmp_path_factory.mktemp("host")) for name in names]
        env = {
            "ZRPC_SECRET": new_secret(),
            "MASTER_ADDR": address_of(0),
            "MASTER_PORT": str(PORT),
        }
        workers = start_workers(hosts, PROGRAM, env, env)
        await_both("ready")
        for sender in range(2):
            switch.set(Way.LOST, sender, 1 - sender)
        (tmp_path / "cut").touch()
        await_both("sent")
        time.sleep(1.0)  # how long the interruption takes
        assert not list(tmp_path.glob("answered*"))
        switch.mend()
        for code, output in workers.outcomes():
            assert code == 0, output

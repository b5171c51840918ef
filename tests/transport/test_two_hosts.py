"""Workers on two hosts: two network namespaces with a cable between them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.transport.two_hosts import ADDRESSES, Host
from zrpc.membership.secret import new_secret, write_secret

WORKER = """
import os
import torch, zrpc

def listeners():
    found = set()
    for name in ("tcp", "tcp6"):
        with open("/proc/thread-self/net/" + name) as file:
            rows = [line.split() for line in file][1:]
        found |= {row[1].split(":")[0] for row in rows if row[3] == "0A"}
    return sorted(found)

rank = int(os.environ["RANK"])
zrpc.init_rpc(f"w{rank}", rpc_backend_options=zrpc.ZmqRpcBackendOptions(init_timeout=15))
print(zrpc.rpc_sync(1 - rank, torch.add, (torch.ones(500_000), rank)).sum().item())
print("listening at", *listeners())
zrpc.shutdown()
"""


@pytest.fixture
def run(
    hosts: list[Host], start_workers: Callable[..., Any]
) -> Callable[..., list[tuple[int, str]]]:
    """Returns a function that runs a worker on each host."""

    def run(*variables: dict[str, str]) -> list[tuple[int, str]]:
        return start_workers(hosts, WORKER, *variables).outcomes()

    return run


@pytest.mark.parametrize("interface", [{}, {"ZRPC_IFACE": "cable"}])
def test_workers_on_two_hosts_exchange_calls(
    run: Callable[..., list[tuple[int, str]]], tmp_path: Path, interface: dict[str, str]
) -> None:
    write_secret(tmp_path / "secret", new_secret())
    outcomes = run(*[{"ZRPC_SECRET_FILE": str(tmp_path / "secret"), **interface}] * 2)
    for rank, (code, output) in enumerate(outcomes):
        assert code == 0, output
        assert f"{500_000 * (1 + rank):.1f}\n" in output
        assert f"name=w{rank}) listens on tcp://{ADDRESSES[rank]}:" in output
        assert "(CURVE)" in output
        # Rank 0's store, too, only on this interface, in the kernel's notation.
        assert f"listening at 0{rank + 1}004D0A\n" in output


def test_two_hosts_without_a_secret(run: Callable[..., list[tuple[int, str]]]) -> None:
    for code, output in run({}, {}):
        assert code == 1
        assert "AuthenticationError: expected a cluster secret, found none" in output
        assert "make a file with `zrpc secret FILE`, copy it to each host" in output


@pytest.mark.parametrize("other", [True, False])
def test_two_hosts_with_different_secrets(
    run: Callable[..., list[tuple[int, str]]], other: bool
) -> None:
    secrets = [{"ZRPC_SECRET": new_secret()}, {"ZRPC_SECRET": new_secret()} if other else {}]
    for rank, (code, output) in enumerate(run(*secrets)):
        assert code == 1
        assert f"name=w{rank}) refuses what claims to be worker {1 - rank}: " in output
        assert f"worker w{rank} (rank {rank}) and the worker of rank {1 - rank} refuse" in output
        assert "AuthenticationError" in output


def test_containers_that_listen_on_their_loopback_are_told(
    run: Callable[..., list[tuple[int, str]]],
) -> None:
    """They have one boot id, and a loopback interface each."""
    secret = new_secret()
    for code, output in run(*[{"ZRPC_SECRET": secret, "ZRPC_IFACE": "lo"}] * 2):
        assert code == 1
        assert "listens on tcp://127.0.0.1:" in output
        assert "which other hosts and containers can't reach: set ZRPC_IFACE there" in output

"""Two hosts: two network namespaces with a cable between them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from zrpc.launch.task import Task
from zrpc.secret import new_secret, write_secret
from zrpc.testing.processes import warm_server

SOON = 30.0
ADDRESSES = ("10.77.0.1", "10.77.0.2")

# Joins its host's namespace, then the mesh.
WORKER = """
import ctypes, os, sys
fd = os.open("/run/netns/" + os.environ["NAMESPACE"], os.O_RDONLY)
if ctypes.CDLL(None, use_errno=True).setns(fd, 0):
    sys.exit(os.strerror(ctypes.get_errno()))
os.close(fd)
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


@dataclass
class Host:
    """A network namespace, and a directory for the sockets in it."""

    namespace: str
    runtime: Path


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=SOON)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    if shutil.which("ip") is None:
        pytest.skip("two hosts need `ip`, of iproute2")
    names = [f"zrpc-{os.getpid()}-{number}" for number in range(2)]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            peer = ["peer", "name", "cable", "netns", names[1]]
            ip("link", "add", "cable", "netns", names[0], "type", "veth", *peer)
            for name, address in zip(names, ADDRESSES, strict=True):
                ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
                for device in ("lo", "cable"):
                    ip("-n", name, "link", "set", device, "up")
        except OSError as error:
            pytest.skip(f"two hosts need network namespaces: {error}")
        yield [Host(name, tmp_path_factory.mktemp("host")) for name in names]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=SOON)


@pytest.fixture
def run(hosts, tmp_path, free_port):
    """Runs a worker on each host, with these variables; returns exit codes and outputs."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)

    def start(rank: int, variables: dict[str, str]) -> int:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("ZRPC_")}
        env = {
            **inherited,
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": str(free_port),
            "NAMESPACE": hosts[rank].namespace,
            "ZRPC_RUNTIME_DIR": str(hosts[rank].runtime),
            **variables,
        }
        task = Task.script(str(script)).within(cwd=str(tmp_path), env=env, line_buffered=True)
        with (tmp_path / f"output{rank}").open("wb") as output:
            return warm_server().spawn(task, stdout=output.fileno(), stderr=output.fileno())

    def run(*variables: dict[str, str]) -> list[tuple[int, str]]:
        pids = [start(rank, each) for rank, each in enumerate(variables)]
        codes = [warm_server().wait(pid, SOON) for pid in pids]
        return [(code, (tmp_path / f"output{n}").read_text()) for n, code in enumerate(codes)]

    return run


@pytest.fixture
def free_port() -> int:
    # The namespaces are new, so that all are free; and a later test must not meet an earlier.
    return 20_000 + int.from_bytes(os.urandom(2), "little") % 10_000


@pytest.mark.parametrize("interface", [{}, {"ZRPC_IFACE": "cable"}])
def test_workers_of_two_hosts(run, tmp_path, interface):
    write_secret(tmp_path / "secret", new_secret())
    outcomes = run(*[{"ZRPC_SECRET_FILE": str(tmp_path / "secret"), **interface}] * 2)
    for rank, (code, output) in enumerate(outcomes):
        assert code == 0, output
        assert f"{500_000 * (1 + rank):.1f}\n" in output
        assert f"name=w{rank}) listens on tcp://{ADDRESSES[rank]}:" in output
        assert "(CURVE)" in output
        # The store of rank 0 too: in the kernel's notation, and nowhere else.
        assert f"listening at 0{rank + 1}004D0A\n" in output


def test_two_hosts_without_a_secret(run):
    for code, output in run({}, {}):
        assert code == 1
        assert "AuthenticationError: expected a cluster secret, found none" in output
        assert "make a file with `zrpc secret FILE`, copy it to each host" in output


@pytest.mark.parametrize("other", [True, False])
def test_two_hosts_with_different_secrets(run, other):
    secrets = [{"ZRPC_SECRET": new_secret()}, {"ZRPC_SECRET": new_secret()} if other else {}]
    for rank, (code, output) in enumerate(run(*secrets)):
        assert code == 1
        assert f"name=w{rank}) refuses what claims to be worker {1 - rank}: " in output
        assert f"worker w{rank} (rank {rank}) and the worker of rank {1 - rank} refuse" in output
        assert "AuthenticationError" in output

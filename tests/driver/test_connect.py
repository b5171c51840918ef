"""connect: this process joins a mesh that runs elsewhere, and leaves it alone."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import zrpc
from tests.support.warm import warm_commands
from zrpc.agent.current import set_default_agent

SECRET = "s3cret" * 10
_SERVE = """
import threading, zrpc

with zrpc.session():
    print("joined", flush=True)
    threading.Event().wait(180)
"""
SHORT = zrpc.ZmqRpcBackendOptions(init_timeout=1.0)


@pytest.fixture
def address(tmp_path: Path, free_port: int) -> Iterator[str]:
    """The address of an elastic mesh of two workers."""
    script = tmp_path / "serve.py"
    script.write_text(_SERVE)
    address = f"127.0.0.1:{free_port}"
    launcher = subprocess.Popen(
        [
            *(warm_commands().python, "-m", "zrpc.cli", "launch", "-n", "2", "--elastic"),
            *("--listen", address, "--grace", "0", str(script)),
        ],
        env={**os.environ, "ZRPC_SECRET": SECRET},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    for _ in range(2):
        assert launcher.stdout.readline().endswith("joined\n")
    yield address
    launcher.terminate()
    launcher.communicate(timeout=60)
    set_default_agent(None)  # of this process: log records would name it


def test_a_driver_joins_serves_and_leaves_alone(address: str) -> None:
    for _ in range(2):  # the mesh goes on
        with zrpc.connect(address, SECRET) as mesh:
            assert sorted(mesh.names) == ["worker0", "worker1"]
            assert mesh.pids == {}

            def ask() -> int:
                return zrpc.rpc_sync("driver", os.getpid)

            assert zrpc.rpc_sync("worker1", ask) == os.getpid()
            with pytest.raises(zrpc.RpcError, match=r"leave it first by mesh\.close\(\)"):
                zrpc.connect(address, SECRET)
        with pytest.raises(zrpc.NotInitializedError, match=r"zrpc\.start_mesh"):
            zrpc.rpc_sync("worker0", os.getpid)
    with pytest.raises(zrpc.AuthenticationError, match="another cluster secret"):
        zrpc.connect(address, "another" * 10)
    with pytest.raises(zrpc.RendezvousError, match="worker0"):
        zrpc.connect(address, SECRET, name="worker0")
    assert not zrpc.is_initialized()


def test_an_address_without_a_mesh_is_an_error(free_port: int) -> None:
    with pytest.raises(ValueError, match="expected HOST:PORT, but got 'host'"):
        zrpc.connect("host", SECRET)
    with pytest.raises(RuntimeError, match="Worker name must match"):
        zrpc.connect(f"127.0.0.1:{free_port}", SECRET, name="a b")
    with pytest.raises(TypeError, match="a cluster secret as a str, but got bytes"):
        zrpc.connect(f"127.0.0.1:{free_port}", SECRET.encode())  # type: ignore[arg-type]
    for options in ({}, {"rpc_timeout": 5}):
        with pytest.raises(TypeError, match=f"instance of RpcBackendOptions, but got {options}"):
            zrpc.connect(f"127.0.0.1:{free_port}", SECRET, rpc_backend_options=options)  # type: ignore[arg-type]
    text = rf"^expected an elastic mesh at 127.0.0.1:{free_port} within 1 s, found none \(\[Errno"
    with pytest.raises(zrpc.RendezvousError, match=text):
        zrpc.connect(f"127.0.0.1:{free_port}", SECRET, rpc_backend_options=SHORT)

"""A graceful shutdown while messages are lost, as by a connection that breaks: it ends."""

from __future__ import annotations

import time
from typing import Any

import pytest

import zrpc
from zrpc import agent as agent_module
from zrpc import graceful_shutdown, roll_call
from zrpc.rref.layer import RRefLayer
from zrpc.testing import Mesh, faults

WITHIN = 20.0
pytestmark = pytest.mark.zrpc(workers=2, faults=True)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graceful_shutdown, "_REMIND_EVERY", 0.05)
    monkeypatch.setattr(agent_module, "_LAYERS_WAIT", 0.3)
    monkeypatch.setattr(roll_call, "_EVERY", 0.05)


def shut_down(mesh: Mesh) -> None:
    """All workers, with no time-out."""
    futures = [mesh.submit(rank, zrpc.shutdown) for rank in range(len(mesh))]
    for future in futures:
        future.result(WITHIN)


@pytest.mark.parametrize("way", [(0, 1), (1, 0)], ids=["from the leader", "to the leader"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_messages_of_the_shutdown_are_lost(mesh: Mesh, way: tuple[int, int], count: int) -> None:
    for rank in range(2):
        assert mesh.run(rank, zrpc.rpc_sync, 1 - rank, max, (1, 2)) == 2
    with faults.drop(mesh, *way, count=count) as fault:
        shut_down(mesh)
        assert fault.happened >= 1


def echo(value: Any) -> Any:
    return value


def test_a_call_without_a_timeout_is_lost(mesh: Mesh) -> None:
    with mesh.agent(0).as_current():
        assert zrpc.rpc_sync(1, echo, (1,)) == 1
        with faults.drop(mesh, 0, 1) as fault:
            lost = zrpc.rpc_async(1, echo, (1,), timeout=0)
            limit = time.monotonic() + WITHIN
            while not fault.happened:
                assert time.monotonic() < limit
                time.sleep(0.002)
        shut_down(mesh)
        with pytest.raises(zrpc.RpcError, match="is lost"):
            lost.wait()


@pytest.mark.zrpc(workers=3)
def test_a_reference_is_lost(mesh: Mesh) -> None:
    """Its sender waits for the word that it has arrived, which never comes."""
    with mesh.agent(0).as_current():
        assert zrpc.rpc_sync(2, echo, (1,)) == 1
        rref = zrpc.remote(1, list)
        assert rref.to_here() == []
        with (
            faults.drop(mesh, 0, 2),
            pytest.raises(zrpc.RpcError, match="is lost"),
        ):
            zrpc.rpc_sync(2, echo, (rref,), timeout=0)
        assert not mesh.agent(0).layer(RRefLayer).quiet()
    shut_down(mesh)

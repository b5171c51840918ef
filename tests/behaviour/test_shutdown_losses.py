"""A graceful shutdown while messages are lost, as by a connection that breaks: it ends."""

from __future__ import annotations

import pytest

import zrpc
from tests.support.targets import echo
from tests.support.waiting import until
from zrpc.agent.shutdown import ShutdownTiming
from zrpc.services.inspection.service import InspectionService
from zrpc.services.rref.service import RRefService
from zrpc.testing import Mesh, faults
from zrpc.testing.plugin import MakeMesh

WITHIN = 20.0
pytestmark = pytest.mark.zrpc(workers=2, faults=True)


@pytest.fixture
def mesh(make_mesh: MakeMesh) -> Mesh:
    """Its workers soon ask for what is lost."""
    made = make_mesh()
    for rank in range(len(made)):
        agent = made.agent(rank)
        agent.service(InspectionService).rules.seconds = 0.05
        agent.graceful_shutdown.timing = ShutdownTiming(remind=0.05, services=0.3)
    return made


def shut_down(mesh: Mesh) -> None:
    """All workers, with no time-out."""
    futures = [mesh.submit(rank, zrpc.shutdown) for rank in range(len(mesh))]
    for future in futures:
        future.result(WITHIN)


@pytest.mark.system
@pytest.mark.parametrize(("way", "count"), [((0, 1), 1), ((1, 0), 2), ((0, 1), 3)])
def test_messages_of_the_shutdown_are_lost(mesh: Mesh, way: tuple[int, int], count: int) -> None:
    for rank in range(2):
        assert mesh.run(rank, zrpc.rpc_sync, 1 - rank, max, (1, 2)) == 2
    with faults.drop(mesh, *way, count=count) as fault:
        shut_down(mesh)
        assert fault.happened >= 1


@pytest.mark.system
def test_a_call_without_a_timeout_is_lost(mesh: Mesh) -> None:
    with mesh.agent(0).as_current():
        assert zrpc.rpc_sync(1, echo, (1,)) == 1
        with faults.drop(mesh, 0, 1) as fault:
            lost = zrpc.rpc_async(1, echo, (1,), timeout=0)
            until(lambda: fault.happened)
        shut_down(mesh)
        with pytest.raises(zrpc.RpcError, match="is lost"):
            lost.wait()


@pytest.mark.system
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
        assert not mesh.agent(0).service(RRefService).idle()
    shut_down(mesh)

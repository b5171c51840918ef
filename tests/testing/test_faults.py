"""Faults of a mesh: each does what it says, and ends when it should."""

from __future__ import annotations

import time

import pytest

import zrpc
from tests.support.waiting import pending, until
from zrpc.testing import Mesh, faults, local_mesh
from zrpc.testing.plugin import MakeMesh

WAIT_SECONDS = 10.0

kinds = pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])


def call(to: int, timeout: float = -1.0) -> int:
    return zrpc.rpc_sync(to, max, (1, 2), timeout=timeout)


def error_of(to: int, timeout: float = -1.0) -> str:
    try:
        call(to, timeout)
    except Exception as error:
        return type(error).__name__
    return "none"


@pytest.mark.system
@pytest.mark.zrpc(workers=3, faults=True)
@kinds
def test_a_cut_that_is_mended_in_time_loses_nothing(make_mesh: MakeMesh, processes: bool) -> None:
    mesh = make_mesh(processes=processes, options={"rpc_timeout": 20})
    assert mesh.run(0, call, 1) == 2
    with faults.cut(mesh, "worker0", 1):
        waiting = [mesh.submit(0, call, 1), mesh.submit(1, call, 0)]
        assert mesh.run(2, call, 0) == mesh.run(2, call, 1) == 2
        for future in waiting:
            assert pending(future, 0.2)
    assert [future.result(WAIT_SECONDS) for future in waiting] == [2, 2]


@pytest.mark.system
@pytest.mark.zrpc(faults=True)
def test_delays_add_up(mesh: Mesh) -> None:
    assert mesh.run(0, call, 1) == 2
    for delays in ([0.1], [0.1, 0.15]):
        active = [faults.delay(mesh, 0, 1, seconds) for seconds in delays]
        began = time.monotonic()
        assert mesh.run(0, call, 1) == 2
        assert time.monotonic() - began >= 2 * sum(delays)
        for fault in active:
            fault.end()
            fault.end()
    assert fault.happened == 0


@pytest.mark.system
@pytest.mark.zrpc(workers=3, faults=True)
def test_a_call_or_an_answer_can_be_dropped(mesh: Mesh) -> None:
    for sender, receiver in ((0, 1), (1, 0)):
        assert mesh.run(0, call, 1) == 2
        with faults.drop(mesh, sender, receiver) as fault:
            assert mesh.run(0, error_of, 1, 0.2) == "RpcTimeoutError"
            assert mesh.run(0, call, 1) == 2  # only one message was dropped
            assert mesh.run(0, call, 2) == 2
        assert fault.happened == 1
    with faults.drop(mesh, 0, 1, count=None) as fault:
        for _ in range(2):
            assert mesh.run(0, error_of, 1, 0.2) == "RpcTimeoutError"
    assert fault.happened == 2
    assert mesh.run(0, call, 1) == 2


_tally: list[int] = []


def record(i: int) -> None:
    _tally.append(i)


@pytest.mark.zrpc(faults=True)
def test_a_message_can_be_duplicated(mesh: Mesh) -> None:
    _tally.clear()
    with faults.duplicate(mesh, 0, 1, count=2) as fault:
        for i in range(3):
            mesh.run(0, zrpc.rpc_sync, 1, record, (i,))
        until(lambda: len(_tally) >= 5, lambda: str(_tally))
    assert sorted(_tally) == [0, 0, 1, 1, 2]
    assert fault.happened == 2
    with faults.duplicate(mesh, 1, 0):  # an answer: its call is complete when the second arrives
        assert mesh.run(0, call, 1) == 2
    assert mesh.run(0, call, 1) == 2


@pytest.mark.zrpc(faults=True, options={"shared_memory": 0})
def test_relays_pass_large_messages_on_unchanged(mesh: Mesh) -> None:
    def echo() -> bool:
        import torch

        sent = torch.arange(1_000_000)
        return torch.equal(zrpc.rpc_sync(1, torch.clone, (sent,)), sent)

    assert mesh.run(0, echo)


@pytest.mark.zrpc(processes=True)
def test_a_worker_can_be_paused_and_resumed_and_killed(mesh: Mesh) -> None:
    with faults.pause(mesh, "worker1"):
        future = mesh.submit(0, call, 1)
        assert pending(future, 0.3)
    assert future.result(WAIT_SECONDS) == 2
    faults.pause(mesh, 1)
    faults.resume(mesh, 1)
    assert mesh.run(0, call, 1) == 2
    faults.pause(mesh, 0)  # the shutdown of the mesh resumes it
    faults.kill(mesh, 1)


@pytest.mark.zrpc(faults=True)
def test_a_mesh_ends_gracefully_under_faults_and_wrong_ones_are_refused(mesh: Mesh) -> None:
    mesh.run(0, call, 1)
    faults.cut(mesh, 0, 1)
    faults.delay(mesh, 0, 1, seconds=60)
    faults.drop(mesh, 0, 1, count=None)
    with pytest.raises(LookupError, match="worker0, worker1"):
        faults.cut(mesh, 0, 2)
    with pytest.raises(ValueError, match="expected two workers, but got 'worker1' twice"):
        faults.cut(mesh, "worker1", 1)
    with pytest.raises(ValueError, match="seconds must be 0 or more"):
        faults.delay(mesh, 0, 1, seconds=-1)


def test_a_mesh_without_relays_refuses_faults(mesh: Mesh) -> None:
    for fault in (faults.cut, faults.drop, faults.duplicate):
        with pytest.raises(RuntimeError, match="faults=True"):
            fault(mesh, 0, 1)
    for fault in (faults.pause, faults.resume, faults.kill):
        with pytest.raises(TypeError, match="processes=True"):
            fault(mesh, 0)
    tcp = local_mesh(2, options={"transport": "tcp"}, faults=True)
    with pytest.raises(ValueError, match="need their Unix sockets"), tcp:
        pass

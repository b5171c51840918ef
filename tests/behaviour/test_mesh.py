"""The mesh that a process is in: sessions, members, and what all workers do together."""

from __future__ import annotations

import os
import sys
import threading

import pytest

import zrpc as rpc
from tests.support.gates import Gate
from tests.support.waiting import until
from zrpc.testing import Mesh

NAMES = ["worker0", "worker1", "worker2"]


# -- sessions ----------------------------------------------------------------------------------


def test_a_session_is_from_init_to_shutdown(alone: int) -> None:
    assert not rpc.is_initialized()
    with rpc.session("me", rank=0, world_size=1) as worker:
        assert worker == rpc.WorkerInfo("me", 0)
        assert rpc.is_initialized()
        assert rpc.rpc_sync("me", max, (1, 2)) == 2
    assert not rpc.is_initialized()


def test_a_session_takes_what_init_rpc_takes(alone: int) -> None:
    options = rpc.ZmqRpcBackendOptions(rpc_timeout=7)
    with rpc.session("me", rpc.BackendType.ZMQ, 0, 1, options, shutdown_timeout=5):
        assert rpc.get_rpc_timeout() == 7.0


@pytest.mark.system
def test_an_exception_ends_a_session_at_once(alone: int) -> None:
    """A graceful shutdown would wait for the handler, which never ends."""
    futures: list[rpc.Future[bool]] = []

    def run() -> None:
        with rpc.session("me"):
            future = rpc.rpc_async("me", lambda: rpc.current_call().wait_cancelled(), timeout=0)
            futures.append(future)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run()
    assert not rpc.is_initialized()
    with pytest.raises(rpc.RpcError):
        futures[0].wait()


def test_a_session_that_ends_well_waits_for_calls_in_progress(alone: int) -> None:
    gate = Gate()
    with rpc.session("me"):
        future = rpc.rpc_async("me", gate.wait_inside, ("done",))
        gate.await_entry()
        threading.Timer(0.05, gate.open).start()
    assert future.wait() == "done"


def test_a_session_may_be_shut_down_inside(alone: int) -> None:
    with rpc.session():
        rpc.shutdown()


@pytest.mark.system
@pytest.mark.parametrize("code", [None, 3])
def test_a_forked_child_ends_the_statement_as_it_wants(alone: int, code: int | None) -> None:
    def run() -> int:
        with rpc.session("me"):
            child = os.fork()
            if child == 0 and code is not None:
                sys.exit(code)
        return child

    parent = os.getpid()
    try:
        child = run()
    except BaseException as error:
        if os.getpid() == parent:
            raise
        os._exit(code if isinstance(error, SystemExit) and code else 99)
    if child == 0:
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (code or 0)


def test_one_session_at_a_time(alone: int) -> None:
    with rpc.session("me"):
        with pytest.raises(RuntimeError, match="RPC is already initialized"), rpc.session("you"):
            pass
        assert rpc.get_worker_info().name == "me"


# -- members -----------------------------------------------------------------------------------


@pytest.mark.zrpc(workers=3)
def test_the_workers_are_listed_by_rank(mesh: Mesh) -> None:
    for infos in mesh.run_all(rpc.get_worker_infos):
        assert [info.name for info in infos] == NAMES
        assert [info.rank for info in infos] == [info.id for info in infos] == [0, 1, 2]
    assert mesh.run_all(rpc.world_size) == [3, 3, 3]


@pytest.mark.system
@pytest.mark.zrpc(workers=3)
def test_a_lost_worker_is_no_longer_listed_but_counted(mesh: Mesh) -> None:
    mesh.agent(2).close()
    with mesh.agent(0).as_current():
        until(lambda: len(rpc.get_worker_infos()) == 2, "the loss is noticed")
        assert [info.name for info in rpc.get_worker_infos()] == NAMES[:2]
        assert rpc.world_size() == 3


def test_without_a_mesh_there_is_a_clear_error() -> None:
    for ask in (
        rpc.get_worker_infos,
        rpc.world_size,
        rpc.barrier,
        lambda: rpc.all_gather(1),
        lambda: rpc.set_rpc_timeout(1),
    ):
        with pytest.raises(rpc.NotInitializedError, match=r"zrpc\.init_rpc"):
            ask()
    assert not rpc.is_initialized()

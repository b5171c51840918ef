"""The mesh that a process is in: sessions, members, and what all workers do together."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading
from collections.abc import Callable
from functools import partial

import pytest

import zrpc as rpc
from tests.support.gates import Gate
from tests.support.threads import start_all
from tests.support.waiting import SOON
from zrpc.agent.current import current_agent
from zrpc.testing import Mesh

NAMES = ["worker0", "worker1", "worker2"]


# -- sessions ----------------------------------------------------------------------------------


def test_a_session_is_from_init_to_shutdown_and_takes_what_init_rpc_takes(alone: int) -> None:
    options = rpc.ZmqRpcBackendOptions(rpc_timeout=7)
    with rpc.session("me", rpc.BackendType.ZMQ, 0, 1, options, shutdown_timeout=5) as worker:
        assert worker == rpc.WorkerInfo("me", 0)
        assert rpc.is_initialized()
        assert rpc.get_rpc_timeout() == 7.0
        assert rpc.rpc_sync("me", max, (1, 2)) == 2
        with pytest.raises(RuntimeError, match="RPC is already initialized"), rpc.session("you"):
            pass
    assert not rpc.is_initialized()
    with rpc.session():
        rpc.shutdown()  # it may be shut down inside


@pytest.mark.system
def test_an_exception_ends_a_session_at_once(alone: int) -> None:
    """A graceful shutdown would wait for the handler, which never ends."""
    with contextlib.suppress(KeyError), rpc.session("me"):
        future = rpc.rpc_async("me", lambda: rpc.current_call().wait_cancelled(), timeout=0)
        raise KeyError("mine")
    assert not rpc.is_initialized()
    with pytest.raises(rpc.RpcError):
        future.wait()


def test_a_session_that_ends_well_waits_for_calls_in_progress(alone: int, gate: Gate) -> None:
    with rpc.session("me"):
        future = rpc.rpc_async("me", gate.wait_inside, ("done",))
        gate.await_entry()
        threading.Timer(0.05, gate.open).start()
    assert future.wait() == "done"


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


# -- members -----------------------------------------------------------------------------------


@pytest.mark.zrpc(workers=3)
def test_workers_know_themselves_and_each_other(caller: Mesh) -> None:
    for infos in caller.run_all(rpc.get_worker_infos):
        assert [info.name for info in infos] == NAMES
        assert [info.rank for info in infos] == [info.id for info in infos] == [0, 1, 2]
    assert caller.run_all(rpc.world_size) == [3, 3, 3]
    assert rpc.get_worker_info() == rpc.WorkerInfo("worker0", 0)
    for rank, name in enumerate(NAMES):
        assert rpc.get_worker_info(name) == rpc.WorkerInfo(name, rank)
        assert rpc.rpc_sync(rank, rpc.get_worker_info) == rpc.WorkerInfo(name, rank)
    with pytest.raises(RuntimeError, match="nobody"):
        rpc.get_worker_info("nobody")


def test_worker_info_is_a_value() -> None:
    info = rpc.WorkerInfo("w1", 1)
    others = {rpc.WorkerInfo("w1", 1), rpc.WorkerInfo("w1", 2), rpc.WorkerInfo("w2", 1)}
    assert len({info, *others}) == 3
    assert pickle.loads(pickle.dumps(info)) == info
    assert repr(info) == "WorkerInfo(id=1, name=w1)"
    with pytest.raises(AttributeError):
        info.name = "w2"  # type: ignore[misc]
    for name in ("a", "A-b_c:9", "x" * 127, "0", ":", "-"):
        assert rpc.WorkerInfo(name, 0).name == name
    for name in ("", "x" * 128, "a b", "a.b", "a/b", "é", "a\n", "\n", "a\0"):
        text = r"Worker name must match .* must be non-empty and shorter than 128 chars, but got"
        with pytest.raises(RuntimeError, match=text):
            rpc.WorkerInfo(name, 0)


def agent_number(*way: int) -> int:
    """Returns the number of the agent of the last worker of a way."""
    if way:
        return rpc.rpc_async(way[0], agent_number, way[1:]).wait()
    return id(current_agent())


def test_two_meshes_in_one_process_do_not_mix(make_mesh: Callable[..., Mesh]) -> None:
    first, second = make_mesh(workers=2), make_mesh(workers=3)
    for mesh, ways in ((first, [(1,), (1, 0)]), (second, [(1,), (1, 2)])):
        for way in ways:
            assert mesh.run(0, agent_number, *way) == id(mesh.agent(way[-1]))
    with pytest.raises(RuntimeError, match="could not find destination"):
        first.run(0, rpc.rpc_sync, 2, max)
    first.shutdown()
    assert second.run(0, agent_number, 1) == id(second.agent(1))


def test_without_a_mesh_there_is_a_clear_error() -> None:
    for ask in (
        *(partial(call, "worker1", max) for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote)),
        *(partial(hook, print) for hook in (rpc.on_worker_lost, rpc.on_worker_joined)),
        *(partial(rpc.get_worker_info, "worker1"), partial(rpc.all_gather, 1)),
        *(rpc.get_worker_info, rpc.get_worker_infos, rpc.world_size, rpc.barrier, rpc.shutdown),
    ):
        with pytest.raises(rpc.NotInitializedError, match=r"^RPC has not been .*zrpc\.init_rpc"):
            ask()
    message = r"Current RPC agent is not set! Did you initialize the RPC framework"
    for use in (partial(rpc.RRef, 1), rpc.get_rpc_timeout, partial(rpc.set_rpc_timeout, 1)):
        with pytest.raises(rpc.NotInitializedError, match=message):
            use()
    assert not rpc.is_initialized()


def test_whether_there_is_an_agent(caller: Mesh) -> None:
    assert rpc.is_available() is True
    assert rpc._is_current_rpc_agent_set()
    assert rpc.rpc_sync(1, rpc._is_current_rpc_agent_set)
    # The agents of a mesh of threads are not the process's.
    assert start_all([rpc._is_current_rpc_agent_set], SOON)() == [False]

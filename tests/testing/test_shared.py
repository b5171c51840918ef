"""Meshes that several tests share: `mesh_factory`, and the search for leaks beside them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import pytest
import torch

import zrpc
from zrpc.testing import LeakError, Mesh, local_mesh, no_leaks

RunTests = Callable[..., pytest.RunResult]
LARGE = 1 << 20


class Holder:
    def get(self) -> int:
        return 1


async def one() -> int:
    return 1


def call_everyone() -> None:
    for worker in zrpc.get_worker_infos():
        zrpc.rpc_sync(worker.name, bytes, args=(LARGE,))
        zrpc.rpc_sync(worker.name, torch.add, args=(torch.ones(LARGE), 1))
        zrpc.remote(worker.name, Holder).rpc_sync().get()
        zrpc.rpc_sync(worker.name, one)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_what_another_mesh_opens_is_no_leak(transport: str) -> None:
    options = {"transport": transport}
    with local_mesh(3, options=options) as shared, no_leaks(), local_mesh(2) as mesh:
        shared.run_all(call_everyone)
        mesh.run_all(call_everyone)


def test_leaks_beside_another_mesh_are_found() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="forgotten")
    kept: list[socket.socket] = []

    def leave() -> None:
        with no_leaks():
            shared.run_all(call_everyone)
            kept.append(socket.create_server(("127.0.0.1", 0)))
            thread.start()

    with local_mesh(2) as shared:
        with pytest.raises(LeakError) as caught:
            leave()
        assert [line.split()[0] for line in caught.value.left] == ["thread", "descriptor"]
        assert "tcp port" in caught.value.left[1]
    kept.pop().close()
    end.set()
    thread.join()


def test_a_call_in_a_test_says_how_to_call(mesh: Mesh) -> None:
    with pytest.raises(zrpc.NotInitializedError, match=r'mesh\.run\("worker0", zrpc\.rpc_sync'):
        zrpc.rpc_sync("worker1", max, args=(1, 2))
    mesh.shutdown()
    with pytest.raises(zrpc.NotInitializedError) as caught:
        zrpc.rpc_sync("worker1", max, args=(1, 2))
    assert "mesh.run" not in str(caught.value)


@pytest.mark.system
def test_the_factory_makes_meshes_for_many_tests(run_tests: RunTests) -> None:
    result = run_tests(
        """
import zrpc

@pytest.fixture(scope="session")
def threads(mesh_factory):
    return mesh_factory(3)

@pytest.fixture(scope="module")
def processes(mesh_factory):
    return mesh_factory(workers=2, processes=True)

def my_name():
    return zrpc.get_worker_info().name

seen = []

def test_first(threads, processes, mesh):
    assert threads.run_all(my_name) == ["worker0", "worker1", "worker2"]
    assert processes.run(1, my_name) == "worker1"
    processes.run(0, print, "of the first")
    seen.append((threads, processes.pid(0)))

def test_second(threads, processes):
    assert seen == [(threads, processes.pid(0))]
    processes.run(0, print, "of the second")
    assert False
"""
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*Captured stdout and stderr of worker0 call*", "of the second"])
    result.stdout.no_fnmatch_line("of the first")


def test_each_wait_for_a_shared_mesh_has_a_limit(run_tests: RunTests) -> None:
    result = run_tests(
        """
@pytest.fixture(scope="module")
def shared(mesh_factory):
    return mesh_factory(2, timeout=2)  # for its start, too

release = threading.Event()

def test_hangs(shared):
    shared.run(0, release.wait, 20)

def test_after(shared):
    release.set()
    shared.run(0, int)

def test_other(mesh):
    assert mesh.run(0, int) == 0
"""
    )
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(["*MeshTimeout: not finished within 2 s*"])


@pytest.mark.system
def test_a_leak_in_a_shared_process_is_an_error_at_the_end(run_tests: RunTests) -> None:
    result = run_tests(
        """
@pytest.fixture(scope="session")
def shared(mesh_factory):
    return mesh_factory(1, processes=True)

def leave():
    threading.Thread(target=time.sleep, args=(20,), name="forgotten", daemon=True).start()

def test_leaves(shared):
    shared.run(0, leave)
"""
    )
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*worker0 (pid *): thread forgotten (a daemon)*"])

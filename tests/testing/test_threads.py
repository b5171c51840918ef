"""Meshes of threads."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import Any, NoReturn

import pytest

import zrpc
from zrpc.testing import Mesh, WorkerTraceback, local_mesh, no_leaks, startup
from zrpc.testing.failure import attribute


def my_name() -> str:
    return zrpc.get_worker_info().name


def test_functions_run_on_their_workers(mesh: Mesh) -> None:
    assert mesh.names == list(mesh) == ["worker0", "worker1"]
    assert len(mesh) == 2
    assert mesh.run("worker1", my_name) == "worker1"
    assert mesh.run(0, my_name) == "worker0"
    assert mesh.run_all(my_name) == ["worker0", "worker1"]
    assert mesh.run(0, dict, [("a", 1)], fn=2, worker=3) == {"a": 1, "fn": 2, "worker": 3}


@pytest.mark.zrpc(workers=3)
def test_run_all_runs_on_all_workers_at_once(mesh: Mesh) -> None:
    assert sorted(mesh.run_all(threading.Barrier(3).wait, 10)) == [0, 1, 2]


def test_a_worker_runs_functions_one_after_another(mesh: Mesh) -> None:
    begin, order = threading.Event(), []
    first = mesh.submit(0, lambda: (begin.wait(10), order.append("first")))
    second = mesh.submit(0, order.append, "second")
    assert not first.cancel()
    begin.set()
    second.result(10)
    assert order == ["first", "second"]


def test_the_mesh_gives_access_to_agents(mesh: Mesh) -> None:
    with mesh.agent(1).as_current():
        assert my_name() == "worker1"
    with pytest.raises(TypeError, match="processes=True"):
        mesh.pid(1)
    with pytest.raises(TypeError, match="expected a mesh of processes"):
        mesh.kill(1)


@pytest.mark.parametrize("worker", ["worker2", 2, -1, True, None])
def test_an_unknown_worker_is_refused(mesh: Mesh, worker: Any) -> None:
    with pytest.raises(LookupError, match=r"worker0, worker1\) or rank \(0 to 1\), but got"):
        mesh.run(worker, my_name)


@dataclass(frozen=True)
class Frozen(Exception):
    code: int


def test_a_failure_keeps_its_type_and_causes_and_names_its_worker(mesh: Mesh) -> None:
    def fail() -> None:
        raise KeyError("outer") from ValueError("inner")

    with pytest.raises(KeyError, match="outer") as info:
        mesh.run(1, fail)
    assert isinstance(info.value.__cause__, ValueError)
    last = info.value.__cause__.__cause__
    assert isinstance(last, WorkerTraceback)
    assert "in worker1 (a thread):\nValueError: inner\n" in str(last)
    assert "in fail\n    raise KeyError" in str(last)
    # One may refuse attributes.
    assert "worker1" in str(attribute(Frozen(7), "worker1", "Traceback").__cause__)


@pytest.mark.zrpc(workers=3)
def test_the_first_failure_names_the_others(mesh: Mesh) -> None:
    def fail() -> None:
        if my_name() == "worker1":
            raise KeyError("first")
        mesh.submit(1, my_name).result(10)  # it runs there after the first failure
        if my_name() == "worker2":
            raise ValueError("second")

    with pytest.raises(KeyError) as info:
        mesh.run_all(fail)
    cause = str(info.value.__cause__)
    assert "in worker1" in cause
    assert "worker2 (a thread) failed as well: ValueError: second" in cause
    assert "worker0" not in cause


@pytest.mark.system
def test_a_failure_does_not_wait_for_hanging_workers(mesh: Mesh) -> None:
    end, ended = threading.Event(), []

    def fail() -> None:
        if my_name() == "worker1":
            raise KeyError("first")
        ended.append(end.wait(10))

    with pytest.raises(KeyError):
        mesh.run_all(fail)
    assert not ended
    end.set()


def test_a_mesh_that_is_shut_down_refuses_work(mesh: Mesh) -> None:
    mesh.shutdown()
    mesh.shutdown()
    with pytest.raises(RuntimeError, match="the mesh is shut down"):
        mesh.run(0, my_name)
    with pytest.raises(RuntimeError, match="worker0 has no agent"):
        mesh.agent(0)


# In the module, because events in a closure can't be sent.
entered, end = threading.Event(), threading.Event()


def enter_and_wait() -> None:
    entered.set()
    end.wait(20)


@pytest.mark.system
def test_a_worker_that_hangs_in_a_call_is_released(mesh: Mesh) -> None:
    """Closing the agent fails its calls, which lets the thread stop."""
    waiting = mesh.submit(0, zrpc.rpc_sync, "worker1", enter_and_wait, timeout=0)
    assert entered.wait(10)
    threads = [t for t in threading.enumerate() if t.name == "zrpc-test-worker0-main"]
    mesh.shutdown(graceful=False)
    with pytest.raises(RuntimeError, match="shut down"):
        waiting.result(10)
    assert [t.is_alive() for t in threads] == [False]
    end.set()


def test_an_interrupt_as_a_local_mesh_has_started_leaves_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start_mesh = startup.start_mesh

    def start_and_interrupt(*args: Any) -> NoReturn:
        start_mesh(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(startup, "start_mesh", start_and_interrupt)
    with no_leaks(), contextlib.suppress(KeyboardInterrupt), local_mesh(2):
        pytest.fail("expected the interrupt")

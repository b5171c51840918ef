"""Meshes of processes."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any, NoReturn

import pytest
import torch

import zrpc
from tests.support.waiting import until
from zrpc.testing import (
    Mesh,
    MeshTimeout,
    WorkerExited,
    WorkerFailed,
    local_mesh,
    served,
)
from zrpc.testing.plugin import MakeMesh
from zrpc.testing.procfs import children
from zrpc.testing.server import warm_server

pytestmark = pytest.mark.zrpc(processes=True)


class Failure(Exception):
    pass


class OfTwo(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


class Unsendable:
    def __reduce__(self) -> Any:
        return int, ("no number",)

    def __repr__(self) -> str:
        return "Unsendable"


def my_name() -> str:
    return zrpc.get_worker_info().name


def wait_without_limit() -> None:
    threading.Event().wait()


@pytest.mark.zrpc(workers=4)
def test_each_worker_is_a_process(mesh: Mesh) -> None:
    pids = mesh.run_all(os.getpid)
    assert pids == [mesh.pid(name) for name in mesh.names]
    assert len({os.getpid(), *pids}) == 5
    assert mesh.run_all(my_name) == ["worker0", "worker1", "worker2", "worker3"]
    assert mesh.run(1, lambda: threading.current_thread() is threading.main_thread())
    assert mesh.run(0, os.getcwd) == os.getcwd()
    assert mesh.run(0, lambda: [p for p in sys.path if p]) == [os.path.abspath(p) for p in sys.path]
    with pytest.raises(TypeError, match="expected a mesh of threads"):
        mesh.agent(0)


def test_an_exception_class_of_the_test_keeps_its_identity(mesh: Mesh) -> None:
    def fail() -> None:
        raise Failure("mine")

    with pytest.raises(Failure, match="mine") as info:
        mesh.run(1, fail)
    cause = str(info.value.__cause__)
    assert f"in worker1 (pid {mesh.pid(1)}):\nTraceback" in cause
    assert "in fail\n    raise Failure" in cause
    with pytest.raises(SystemExit):
        mesh.run(0, sys.exit, 3)

    def compare() -> None:  # is sent by value: imported there, it would have plain assertions
        found = {"a": 1}
        assert found == {"a": 2}

    with pytest.raises(AssertionError, match="'a': 1"):
        mesh.run(0, compare)


def test_what_cannot_be_sent_back_is_described(mesh: Mesh) -> None:
    def fail() -> None:
        raise LookupError(Unsendable())

    def fail_by_two() -> None:
        raise OfTwo(1, 2)  # its args do not make it again

    for function, kind, text in (
        (fail, WorkerFailed, "LookupError: Unsendable"),
        (fail_by_two, OfTwo, r"^1 and 2$"),
        (threading.Lock, WorkerFailed, "the result can't be pickled: <unlocked"),
    ):
        with pytest.raises(kind, match=text):
            mesh.run(0, function)
        assert mesh.run(0, my_name) == "worker0"
    with pytest.raises(zrpc.SerializationError, match="found one of type lock"):
        mesh.submit(0, my_name, [1, {"a": threading.Lock()}])


def test_what_calls_can_send_is_sent_both_ways(mesh: Mesh) -> None:
    def work(values: list[Any]) -> list[Any]:
        script, small, view, large = values
        large += script(torch.ones(1)).item() * 0
        return [torch.jit.script(torch.nn.Identity()), small, view, large]

    large = torch.ones(1 << 20)
    values = [torch.jit.script(torch.nn.Linear(1, 1)), large[:2].to(torch.float8_e5m2)]
    script, small, view, back = mesh.run(0, work, [*values, memoryview(b"abc"), large])
    assert script(large[:1]).item() == 1
    assert small.dtype is torch.float8_e5m2
    assert view == b"abc"
    assert isinstance(view, memoryview)
    assert torch.equal(back.add_(0), large)


def test_calls_to_a_killed_worker_fail(mesh: Mesh) -> None:
    waiting = mesh.submit(1, wait_without_limit)
    mesh.kill("worker1")
    for call in (waiting.result, lambda: mesh.run(1, my_name)):
        with pytest.raises(WorkerExited, match=r"worker1 \(pid \d+\) was killed by SIGKILL"):
            call()
    assert mesh.run(0, my_name) == "worker0"
    with pytest.raises(RuntimeError, match="expected a mesh made with restarts=True"):
        mesh.restart(1)


@pytest.mark.zrpc(restarts=True)
@pytest.mark.parametrize(
    "elastic", [False, pytest.param(True, marks=pytest.mark.zrpc(elastic=True))]
)
def test_a_killed_worker_can_be_restarted(mesh: Mesh, elastic: bool) -> None:
    assert mesh.run(0, zrpc.rpc_sync, 1, os.getpid) == mesh.pid(1)
    with pytest.raises(RuntimeError, match=r"was not killed: expected mesh.kill\(1\) first"):
        mesh.restart(1)
    for incarnation in (1, 2):
        before = mesh.pid(1)
        mesh.kill(1)
        mesh.restart(1)
        assert mesh.pid(1) != before
        assert mesh.run(0, zrpc.rpc_sync, 1, os.getpid) == mesh.pid(1)
        assert mesh.run(1, zrpc.rpc_sync, 0, os.getpid) == mesh.pid(0)
        assert mesh.run(0, zrpc.get_worker_info, "worker1").incarnation == incarnation
    mesh.shutdown()  # gracefully, since no worker is missing


def test_the_exit_of_a_worker_is_an_error(make_mesh: MakeMesh) -> None:
    mesh = make_mesh()
    with pytest.raises(WorkerExited, match=r"worker0 \(pid \d+\) exited with status 3"):
        mesh.run(0, os._exit, 3)
    with pytest.raises(WorkerExited, match=r"3; if the test expects that, call mesh\.kill\(0\)"):
        mesh.shutdown()  # a worker is missing that the test did not kill


def test_a_test_that_expects_the_exit_of_a_worker_kills_it_afterwards(mesh: Mesh) -> None:
    with pytest.raises(zrpc.WorkerDied):
        mesh.run(0, zrpc.rpc_sync, 1, os._exit, (3,))
    mesh.kill(1)
    mesh.shutdown()


def test_the_output_of_workers_is_kept_and_shows_where_one_crashed(
    make_mesh: MakeMesh, pytestconfig: pytest.Config
) -> None:
    def crash() -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    mesh = make_mesh()
    mesh.run(1, print, "to stdout", flush=True)
    mesh.run(1, lambda: print("to stderr", file=sys.stderr))
    with pytest.raises(WorkerExited, match="SIGSEGV"):
        mesh.run(0, crash)
    mesh.shutdown(graceful=False)
    if pytestconfig.getoption("capture") != "no":
        assert "in crash" in mesh.output(0)
        assert mesh.output(1) == "to stdout\nto stderr\n"


@pytest.mark.zrpc(leaks=False)
def test_leaks_are_not_searched_for_if_they_are_allowed(mesh: Mesh) -> None:
    """The search would wait for two seconds."""

    def forbid_search() -> None:
        from zrpc.testing.leaks import Resources

        def left_behind(self: Any) -> NoReturn:
            raise AssertionError("expected no search for leaks")

        Resources.left_behind = left_behind

    mesh.run_all(forbid_search)
    mesh.shutdown()


def test_the_report_of_a_hang_names_a_stopped_worker(make_mesh: MakeMesh) -> None:
    """A process that can't even write its stacks must not delay the report."""

    def hang() -> None:
        with local_mesh(2, processes=True, timeout=1.5) as mesh:
            os.kill(mesh.pid(1), signal.SIGSTOP)
            mesh.run(1, my_name)

    with pytest.raises(MeshTimeout) as info:
        hang()
    assert "none within 1 s; state: T" in str(info.value)


@pytest.mark.parametrize("point", ["its socket", "its reader"])
def test_an_interrupt_as_a_process_is_started_leaves_none(
    monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    server = warm_server()
    before = children(server.pid)
    start = threading.Thread.start

    def interrupt(*_: object) -> NoReturn:
        monkeypatch.undo()
        raise KeyboardInterrupt

    def start_thread(thread: threading.Thread) -> None:
        (interrupt if thread.name.endswith("-reader") else start)(thread)

    if point == "its socket":
        monkeypatch.setattr(served, "Connection", interrupt)
    else:
        monkeypatch.setattr(threading.Thread, "start", start_thread)
    with pytest.raises(KeyboardInterrupt), local_mesh(2, processes=True):
        pass
    until(lambda: {*children(server.pid)} <= {*before}, "no worker is left")


@pytest.mark.parametrize("outcome", [pytest.skip, pytest.fail, pytest.exit])
def test_outcomes_of_pytest_reach_the_test(mesh: Mesh, outcome: Any) -> None:
    with pytest.raises(outcome.Exception, match="on purpose") as raised:
        mesh.run(1, outcome, "on purpose")
    assert raised.value.msg == "on purpose"

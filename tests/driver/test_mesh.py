"""start_mesh: a mesh of the processes that this test's process has started."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed

import zrpc
from tests.support.waiting import until
from zrpc.agent.current import set_default_agent
from zrpc.testing import no_leaks
from zrpc.testing.procfs import state_of


@pytest.fixture(scope="module", autouse=True)
def _no_agent_is_left() -> Iterator[None]:
    yield
    set_default_agent(None)  # log records would name it


opened: list[zrpc.DriverMesh] = []


def close() -> None:
    """Runs on the driver."""
    opened[0].close()


class Lines:
    """A stream without a descriptor, as those of some notebooks."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


@pytest.fixture(scope="class")
def mesh() -> Iterator[zrpc.DriverMesh]:
    os.environ["OF_THE_DRIVER"] = "before"
    before = dict(os.environ)
    with zrpc.start_mesh({"learner": 1, "rollout": 2}, env={"EXTRA": "yes"}) as mesh:
        assert dict(os.environ) == before
        os.environ["OF_THE_DRIVER"] = "after"
        yield mesh
    del os.environ["OF_THE_DRIVER"]
    assert mesh.closed
    assert mesh.pids == {}


@pytest.mark.usefixtures("mesh")
class TestOpenMesh:
    def test_workers_are_named_by_roles_and_the_driver_is_last(self, mesh: zrpc.DriverMesh) -> None:
        assert mesh.names == ("learner0", "rollout0", "rollout1")
        infos = [(info.name, info.id) for info in zrpc.get_worker_infos()]
        assert infos == [("learner0", 0), ("rollout0", 1), ("rollout1", 2), ("driver", 3)]
        roles = zrpc.rpc_sync(zrpc.group("rollout*"), os.getenv, args=("ZRPC_ROLE",))
        assert roles == ["rollout", "rollout"]
        assert len(zrpc.rpc_sync(zrpc.group("*"), os.getpid)) == 4

    def test_a_second_mesh_is_refused_and_the_first_goes_on(self, mesh: zrpc.DriverMesh) -> None:
        with pytest.raises(zrpc.RpcError, match=r"leave it first by mesh\.close\(\)"):
            zrpc.start_mesh(1)
        assert zrpc.rpc_sync("rollout1", max, args=(1, 2)) == 2

    def test_workers_have_the_environment_folder_and_path_of_the_start_and_own_sessions(
        self, mesh: zrpc.DriverMesh
    ) -> None:
        def found() -> tuple[str | None, ...]:
            return tuple(map(os.getenv, ("OF_THE_DRIVER", "EXTRA"))), os.getcwd(), sys.path

        environment, folder, path = zrpc.rpc_sync("learner0", found)
        assert (environment, folder) == (("before", "yes"), os.getcwd())
        assert path == [os.path.abspath(entry) for entry in sys.path]
        assert [os.getsid(pid) for pid in mesh.pids.values()] == [*mesh.pids.values()]

    def test_a_breakpoint_on_a_worker_is_one_of_zrpc(self) -> None:
        def stop() -> str:
            breakpoint(timeout=0.1)  # nobody attaches
            return "went on"

        assert zrpc.rpc_sync("learner0", stop) == "went on"

    def test_a_handler_cannot_close_the_mesh_gracefully(self, mesh: zrpc.DriverMesh) -> None:
        opened.append(mesh)
        with pytest.raises(zrpc.RpcError, match="waits for all handlers"):
            zrpc.rpc_sync("driver", close)
        opened.clear()
        assert not mesh.closed
        assert zrpc.rpc_sync("learner0", max, args=(1, 2)) == 2

    def test_workers_can_form_a_process_group_by_their_variables(self) -> None:
        def total() -> float:
            torch.distributed.init_process_group("gloo")
            value = torch.tensor(float(torch.distributed.get_rank()))
            torch.distributed.all_reduce(value)
            torch.distributed.destroy_process_group()
            return value.item()

        workers = zrpc.group(["learner0", "rollout0", "rollout1"])
        assert zrpc.rpc_sync(workers, total) == [3.0] * 3

    def test_lines_go_to_the_present_stdout_with_the_name_of_their_worker(self) -> None:
        def speak() -> None:
            print("half a line", end="")
            print(" and its end")
            sys.stdout.write("ä\udcff\n")
            sys.stdout.write("\rone\rtwo\n")  # at once, or the first may be shown, too
            sys.stdout.flush()

        lines = Lines()
        with contextlib.redirect_stdout(lines):  # type: ignore[type-var]
            zrpc.rpc_sync("rollout1", speak)
            until(lambda: "two" in lines.text)
        assert lines.text.splitlines() == [
            "[rollout1] half a line and its end",
            "[rollout1] ä\\xff",
            "[rollout1] two",
        ]


def test_a_worker_that_dies_is_reported_and_close_neither_raises_nor_hangs() -> None:
    errors = Lines()
    with contextlib.redirect_stderr(errors):  # type: ignore[type-var]
        mesh = zrpc.start_mesh(2, max_restarts=1)
        pid = mesh.pids["worker1"]
        with pytest.raises(zrpc.WorkerDied):
            zrpc.rpc_sync("worker1", os.kill, args=(pid, signal.SIGKILL))
        until(lambda: mesh.pids.get("worker1", pid) != pid)
        until(lambda: f"worker1 (pid {pid}) has exited: SIGKILL, not sent by zrpc" in errors.text)
        assert "starting it again (restart 1 of 1)" in errors.text

        def back() -> bool:
            with contextlib.suppress(zrpc.WorkerDied):
                return zrpc.rpc_sync("worker1", os.getpid) == mesh.pids["worker1"]
            return False

        until(back)
        with pytest.raises(zrpc.WorkerDied):
            zrpc.rpc_sync("worker1", os._exit, args=(3,))
        until(lambda: "has exited: exit code 3; calls to it raise WorkerDied" in errors.text)
    mesh.close()
    mesh.close()
    with pytest.raises(zrpc.NotInitializedError, match=r"zrpc\.start_mesh"):
        zrpc.rpc_sync("worker0", os.getpid)


def test_a_worker_that_cannot_start_ends_the_start_with_its_error() -> None:
    errors, started = Lines(), time.monotonic()
    text = r"worker\d \(pid \d+\) has exited: exit code 1"
    with (
        contextlib.redirect_stderr(errors),  # type: ignore[type-var]
        pytest.raises(zrpc.RendezvousError, match=text),
    ):
        zrpc.start_mesh(2, env={"ZRPC_INIT_TIMEOUT": "no number"})
    assert "OptionError" in errors.text
    assert time.monotonic() - started < zrpc.ZmqRpcBackendOptions().init_timeout
    assert not zrpc.is_initialized()


def test_the_timeout_of_the_workers_calls_may_be_in_their_environment() -> None:
    timeout = {"ZRPC_RPC_TIMEOUT": "77"}
    with pytest.raises(ValueError, match="ZRPC_RPC_TIMEOUT in env, or rpc_backend_options"):
        zrpc.start_mesh(1, env=timeout, rpc_backend_options=zrpc.ZmqRpcBackendOptions())
    with zrpc.start_mesh(1, env=timeout):
        assert zrpc.rpc_sync("worker0", zrpc.get_rpc_timeout) == 77
        assert zrpc.get_rpc_timeout() == zrpc.ZmqRpcBackendOptions().rpc_timeout != 77


def test_one_worker_may_write_more_than_its_part_of_what_a_notebook_shows() -> None:
    def report() -> None:
        for i in range(550):
            print("layer", i)

    lines = Lines()
    with contextlib.redirect_stdout(lines), zrpc.start_mesh(2):  # type: ignore[type-var]
        zrpc.rpc_sync("worker0", report)
    assert lines.text.splitlines() == [f"[worker0] layer {i}" for i in range(550)]


def test_nothing_is_left_after_the_end() -> None:
    with no_leaks():
        with zrpc.start_mesh(1, max_restarts=1) as mesh:
            assert repr(mesh) == "<mesh of 1 worker and a driver: worker0>"
            assert zrpc.rpc_sync(0, torch.ones, args=(300_000,)).sum() == 300_000
        set_default_agent(None)


def test_an_error_in_the_block_stops_workers_in_spite_of_what_they_do() -> None:
    with pytest.raises(KeyError), zrpc.start_mesh(1) as mesh:  # noqa: PT012
        pids = mesh.pids.values()
        zrpc.rpc_async("worker0", time.sleep, args=(1000,), timeout=0)
        raise KeyError
    assert [state_of(pid) for pid in pids] == [""] * len(pids)


def test_wrong_workers_and_frozen_programs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    wrong: list[tuple[Any, type[Exception], str]] = [
        (0, ValueError, "1 worker or more of the role worker, but got 0"),
        ({}, ValueError, "got no role"),
        ({"driver": 1}, ValueError, "other roles than 'driver'"),
        ({"a b": 1}, ValueError, "but got 'a b'"),
        ({"a": 11, "a1": 1}, ValueError, "two workers would have the name a10"),
        (True, TypeError, "but got True"),
        ("4", TypeError, "but got '4'"),
        (1, zrpc.RpcError, "the program is frozen"),
    ]
    for workers, error, text in wrong:
        with pytest.raises(error, match=text):
            zrpc.start_mesh(workers)


@pytest.mark.parametrize(
    ("argument", "value", "error", "text"),
    [
        ("rpc_backend_options", {"rpc_timeout": 5}, TypeError, "got {'rpc_timeout': 5}"),
        ("rpc_backend_options", {}, TypeError, "got {}"),
        ("rpc_backend_options", zrpc.RpcBackendOptions(), TypeError, "must be a `TensorPipe"),
        ("max_restarts", "1", ValueError, "restarts, as an int, but got '1'"),
        ("max_restarts", 1.5, ValueError, "restarts, as an int, but got 1.5"),
        ("max_restarts", -1, ValueError, "0 or more restarts, as an int, but got -1"),
        ("env", {"A": 1}, TypeError, "of type str, but got 'A': 1"),
        ("env", {1: "A"}, TypeError, "of type str, but got 1: 'A'"),
    ],
)
def test_wrong_arguments_are_refused_before_workers_start(
    argument: str, value: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        zrpc.start_mesh(1, **{argument: value})

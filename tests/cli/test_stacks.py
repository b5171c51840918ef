"""zrpc stacks, on meshes of processes."""

from __future__ import annotations

import ctypes
import json
import os
import time

import pytest
from click.testing import CliRunner, Result

import zrpc
from tests.support.gates import Gate
from tests.support.waiting_circle import holds_up_its_loop
from zrpc.cli import main
from zrpc.testing import Mesh

DEADLINE = 20.0


def stacks(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["stacks", *arguments])


def stacks_with(text: str, *arguments: str) -> str:
    limit = time.monotonic() + DEADLINE
    while text not in (output := stacks(*arguments).output):
        assert time.monotonic() < limit, output
    return output


@pytest.mark.zrpc(processes=True, options={"num_worker_threads": 1})
def test_circle_of_waiting_between_processes_is_shown(mesh: Mesh) -> None:
    mesh.submit(0, zrpc.rpc_sync, "worker0", holds_up_its_loop)
    output = stacks_with("A circle of waiting over 2 workers", str(mesh.pid(1)))
    for rank in range(2):
        assert f"worker{rank} (rank {rank}), pid {mesh.pid(rank)}\n" in output
    assert 'return zrpc.rpc_sync("worker0", coroutine)\n' in output
    assert "which runs calls_a_coroutine for worker0 (rank 0), most recent call last:" in output
    assert "could not be asked" not in output
    for rank in range(2):
        mesh.kill(rank)


@pytest.mark.parametrize("plain", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_colours_are_shown_only_on_a_colour_terminal(mesh: Mesh, plain: dict[str, str]) -> None:
    env = {"NO_COLOR": None, "TERM": "xterm", **plain}
    done = CliRunner(env=env).invoke(main, ["stacks", str(os.getpid())], color=True)
    assert "Mesh of 2 workers" in done.output
    assert ("\x1b[1m" in done.output) == (not plain)


@pytest.mark.zrpc(processes=True)
def test_process_that_is_stopped_or_holds_the_interpreter_is_reported(mesh: Mesh) -> None:
    mesh.run(0, zrpc.rpc_sync, "worker1", max, (1, 2))
    pid = mesh.pid(1)
    mesh.pause(1)
    begin = time.monotonic()
    done = stacks("--timeout", "0.5", str(pid))
    assert time.monotonic() - begin < 5
    assert done.exit_code == 0
    assert f"worker0 (rank 0), pid {mesh.pid(0)}" in done.output
    assert (
        f"worker1 (rank 1), pid {pid}, could not be asked: its process is stopped (SIGSTOP, or a "
        "debugger)"
    ) in done.output
    mesh.resume(1)
    holds = mesh.submit(1, hold_the_interpreter, 1.5)
    output = stacks_with("no answer within 0.3 s", "--timeout", "0.3", str(pid))
    assert f"`py-spy dump --pid {pid}`" in output
    holds.result()


def hold_the_interpreter(seconds: float) -> None:
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def test_output_as_json(mesh: Mesh) -> None:
    done = stacks("--json", str(os.getpid()))
    assert done.exit_code == 0
    [found] = json.loads(done.output)["meshes"]
    assert [(w["name"], w["pid"]) for w in found["workers"]] == [
        (name, os.getpid()) for name in mesh.names
    ]
    assert found["silent"] == found["cycles"] == []


def test_calls_and_threads_that_are_alike_are_shown_once(mesh: Mesh) -> None:
    with Gate() as gate:
        calls = [mesh.run(0, zrpc.rpc_async, "worker1", gate.wait_inside) for _ in range(5)]
        gate.await_entry(5)
        pid = str(os.getpid())
        shown = stacks_with("for worker0 (rank 0), and 4 more like it, most recent call", pid)
        assert shown.count("\n  ← ") == 1
        assert stacks("--all", pid).output.count("\n  ← ") == 5
    zrpc.wait_all(calls)


def test_unknown_worker_and_invalid_timeout_are_errors() -> None:
    done = stacks("--timeout", "nan")
    assert done.exit_code == 2
    assert "Invalid value for '--timeout'" in done.output
    done = stacks("--timeout", "0.5", f"nobody-{os.getpid()}")
    assert done.exit_code == 1
    assert "no running mesh of this user with nobody-" in done.output

"""zrpc top: what it counts, its screens on a terminal, and its JSON."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import zrpc
from tests.services.debugger.attached import Attached
from tests.services.debugger.test_breakpoint import stops
from tests.services.inspection import doors
from tests.support.gates import Gate
from tests.support.terminal import TerminalProgram
from tests.support.waiting import SOON, until
from zrpc.cli import main
from zrpc.cli.top_tables import SORT_KEYS, sorted_workers
from zrpc.services.inspection.discovery import MeshView, find_meshes
from zrpc.services.inspection.rates import WorkerRates, mesh_rates
from zrpc.testing import Mesh

PID = str(os.getpid())
CALLS = 200
RUNNING = {"worker0": "running", "worker1": "running"}


@pytest.fixture
def door() -> Iterator[Gate]:
    doors.door = Gate()
    yield doors.door
    doors.door.open()


def top(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["top", *arguments])


def look(pid: str = PID) -> MeshView:
    [view], _ = find_meshes([pid], SOON, numbers=True)
    return view


def rates(before: MeshView | None = None) -> list[WorkerRates]:
    return mesh_rates([] if before is None else before.snapshots.values(), look())


def states(pid: str = PID) -> dict[str, str]:
    return {worker.name: worker.state for worker in mesh_rates([], look(pid))}


def call_often(worker: str, count: int) -> None:
    for _ in range(count):
        zrpc.rpc_sync(worker, sorted, ([3, 1, 2],))
    with pytest.raises(KeyError):
        zrpc.rpc_sync(worker, fails)


def fails() -> None:
    raise KeyError("on purpose")


def seconds(view: MeshView, before: MeshView, name: str) -> float:
    [new] = [each.stats for each in view.snapshots.values() if each.name == name]
    [old] = [each.stats for each in before.snapshots.values() if each.name == name]
    return float(new["seconds"] - old["seconds"])


@pytest.mark.system
def test_rates_are_those_of_the_calls_made_between_two_looks(mesh: Mesh) -> None:
    mesh.run(0, call_often, "worker1", 7)  # not counted
    before = look()
    for worker in mesh_rates([], before):  # a first look has no rates
        assert worker.calls_out is worker.cpu is worker.p50_ms is None
        assert worker.queued == 0
    mesh.run(0, call_often, "worker1", CALLS)
    view = look()
    caller, callee = mesh_rates(before.snapshots.values(), view)
    took = seconds(view, before, "worker0")
    assert caller.calls_out * took == pytest.approx(CALLS + 1)
    assert caller.calls_in == 0
    assert 0 < caller.p50_ms <= caller.p99_ms
    [ordered, failed] = sorted(caller.functions, key=lambda each: -each.calls)
    assert (ordered.name, failed.name) == ("sorted", "fails")
    assert ordered.calls * took == pytest.approx(CALLS)
    assert (ordered.runs, ordered.errors) == (0, 0)
    assert failed.errors * took == pytest.approx(1)

    took = seconds(view, before, "worker1")
    assert callee.calls_in * took == pytest.approx(CALLS + 1)
    # By the time that they took; one that fails may take long, as it is logged.
    by_time = [each.busy for each in callee.functions]
    assert by_time == sorted(by_time, reverse=True)
    [ordered] = [each for each in callee.functions if each.name == "sorted"]
    assert ordered.busy * 1000 == pytest.approx(ordered.run_ms * ordered.runs)
    assert (caller.bytes_out or 0) > 32 * CALLS / took / 2
    [peer] = callee.peers
    assert (peer.name, peer.state) == ("worker0", "member")
    assert peer.bytes_in > 0
    assert (callee.memory or 0) > 2**20
    assert (callee.cpu or 0) > 0


@pytest.mark.system
@pytest.mark.zrpc(options={"num_worker_threads": 1})
def test_handlers_and_queue(mesh: Mesh, door: Gate) -> None:
    reference = mesh.run(0, zrpc.remote, 1, doors.knock)
    futures = [mesh.run(0, zrpc.rpc_async, 1, doors.knock) for _ in range(2)]
    # A handler that waits at the door for some tenths of a second lets another one begin.
    until(lambda: rates()[1].queued + rates()[1].handlers == 3)
    callee = rates()[1]
    assert callee.handlers >= 1
    assert callee.rrefs == 1
    door.open()
    assert [future.wait() for future in futures] == ["in", "in"]
    assert mesh.run(0, reference.to_here) == "in"


@pytest.mark.system
@pytest.mark.zrpc(options={"warn_after": 0.2})
def test_worker_whose_call_waits_too_long_is_stuck(mesh: Mesh, door: Gate) -> None:
    future = mesh.run(0, zrpc.rpc_async, 1, doors.knock)
    until(lambda: states() == {"worker0": "stuck", "worker1": "running"})
    door.open()
    assert future.wait() == "in"
    assert states() == RUNNING


def test_worker_at_a_breakpoint_and_one_that_waits_for_the_others_to_leave(mesh: Mesh) -> None:
    future = mesh.run(0, zrpc.rpc_async, 1, stops, (1,))
    terminal = Attached(mesh, 1)
    terminal.read_until("(Pdb) ")
    assert states() == {"worker0": "running", "worker1": "at a breakpoint"}
    terminal.send("c")
    assert future.wait() == 3
    leaves = mesh.submit(1, lambda: mesh.agent(1).shutdown(timeout=SOON))
    until(lambda: states() == {"worker0": "running", "worker1": "serving"})
    mesh.agent(0).close()
    leaves.result(SOON)


@pytest.mark.system
@pytest.mark.zrpc(workers=3)
def test_lost_worker_is_shown_with_its_reason(mesh: Mesh) -> None:
    mesh.run(0, zrpc.rpc_sync, 1, max, (1, 2))
    mesh.agent(1).close()
    until(lambda: states().get("worker1") == "lost")
    gone = rates()[1]
    assert (gone.rank, gone.calls_in) == (1, None)
    assert "worker1" in gone.why


@pytest.mark.system
def test_a_table_is_printed_with_the_columns_that_fit(mesh: Mesh) -> None:
    mesh.run(0, zrpc.rpc_sync, 1, max, (1, 2))
    for columns, sort, charset in (
        (160, "cpu", "utf-8"),
        (80, "rank", "utf-8"),
        (80, "rrefs", "utf-8"),
        (30, "rank", "ascii"),
    ):
        runner = CliRunner(charset, env={"COLUMNS": str(columns)})
        done = runner.invoke(main, ["top", "--once", "--interval", "0.3", "--sort", sort, PID])
        assert done.exit_code == 0
        assert "Mesh of 2 workers" in done.output
        assert max(map(len, done.output.splitlines())) <= columns
        if charset == "ascii":  # in which there is no ellipsis
            assert "?" in done.output
            continue
        assert "running" in done.output
        assert "…" not in done.output
        heading = next(line for line in done.output.splitlines() if "worker " in line)
        assert ("RRefs" in heading) == (sort == "rrefs" or columns == 160)
        assert ("bytes" in heading) == (columns == 160)


@pytest.mark.zrpc(processes=True, restarts=True)
def test_the_json_of_processes_and_a_restarted_worker_counts_once(mesh: Mesh) -> None:
    mesh.run(0, zrpc.rpc_sync, 1, os.getpid)
    done = top("--once", "--json", "--interval", "0.5", str(mesh.pid(0)))
    assert done.exit_code == 0
    content = json.loads(done.output)
    assert content["unknown"] == []
    [found] = content["meshes"]
    assert [(w["name"], w["rank"], w["pid"], w["state"]) for w in found["workers"]] == [
        (name, rank, mesh.pid(rank), "running") for rank, name in enumerate(mesh.names)
    ]
    assert all(worker["cpu"] is not None for worker in found["workers"])
    mesh.kill(1)
    until(lambda: states(str(mesh.pid(0))) == {"worker0": "running", "worker1": "lost"})
    command = ["top", "--once", "--interval", "0.3", str(mesh.pid(0))]
    assert "Mesh of 1 worker, 1 lost" in CliRunner().invoke(main, command).output
    mesh.restart(1)
    mesh.run(0, zrpc.rpc_sync, 1, os.getpid)
    until(lambda: states(str(mesh.pid(0))) == RUNNING)
    assert "Mesh of 2 workers" in CliRunner().invoke(main, command).output.splitlines()[0].strip()


def test_workers_have_a_second_to_answer_however_short_the_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[float] = []

    def find(wanted: Any, timeout: float, numbers: bool) -> Any:
        given.append(timeout)
        raise LookupError("there is no mesh")

    monkeypatch.setattr(importlib.import_module("zrpc.cli.top"), "find_meshes", find)
    for interval in ("0.1", "3"):
        assert top("--once", "--json", "--interval", interval).exit_code == 1
    assert given == [1.0, 3.0]


def test_workers_are_sorted_by_the_key_and_unknown_ones_are_last() -> None:
    one, two = WorkerRates("b", 1, calls_in=1.0, cpu=0.0), WorkerRates("a", 2, calls_in=5.0)
    gone = WorkerRates("c", 0, state="lost")
    workers = [gone, one, two]
    assert sorted_workers(workers, "rank") == [gone, one, two]
    assert sorted_workers(workers, "name") == [two, one, gone]
    assert sorted_workers(workers, "in") == [two, one, gone]
    assert sorted_workers(workers, "cpu") == [one, gone, two]
    for key in SORT_KEYS:
        assert len(sorted_workers(workers, key)) == 3


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--once", f"nobody-{PID}"], 1, "no running mesh of this user with nobody-"),
        (["--json"], 2, "--json is for --once"),
        (["--sort", "colour"], 2, "expected one of rank, name, in"),
        (["--interval", "nan"], 2, "Invalid value for '--interval'"),
    ],
)
def test_wrong_command_line(arguments: Any, code: int, text: str) -> None:
    done = top(*arguments)
    assert (done.exit_code, text in done.output) == (code, True), done.output


def test_without_a_terminal_the_live_screen_is_refused(mesh: Mesh) -> None:
    done = top(PID)
    assert done.exit_code == 2
    assert "expected a terminal" in done.output


@pytest.mark.system
@pytest.mark.parametrize("end", ["q", "\x03", "the mesh ends"])
def test_keys_and_end_on_a_terminal(mesh: Mesh, tmp_path: Path, end: str) -> None:
    program = TerminalProgram(["-m", "zrpc.cli", "top", "--interval", "0.3", PID], tmp_path)
    try:
        program.read_until("Mesh of 2 workers")
        program.read_until("q quit")
        program.type("\x1b[B\r")  # down, Enter
        program.read_until("worker1 (rank 1), pid")
        program.read_until("Busiest peers")
        program.type("\x1b\r")  # Esc, and Enter so soon that one read finds both
        program.read_until("Mesh of 2 workers")
        program.read_until("Busiest peers")
        program.type("\x1b")
        program.read_until("Mesh of 2 workers")
        if end == "the mesh ends":
            mesh.shutdown()
        else:
            program.type(end)
        assert program.finish() == (end == "the mesh ends")
        assert ("no running mesh" in program.seen) == (end == "the mesh ends")
    finally:
        program.close()

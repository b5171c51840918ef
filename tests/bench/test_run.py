"""Tests of runs in which something fails, hangs or dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import nullcontext

import pytest

from tests.support.waiting import until
from zrpc.bench import run as run_module
from zrpc.bench.mesh import HungError, Mesh, MeshError
from zrpc.bench.row import Group, Row
from zrpc.bench.run import Run, Settings
from zrpc.bench.session import Sampling
from zrpc.launch import Starter
from zrpc.testing.procfs import children, state_of

GOOD = Row("good", "calls:empty")
BROKEN = Row("broken", "calls:no_such")
SLOW = Row("slow", "calls:empty", deadline=0.3)
ENDLESS = Sampling(seconds=3600)


def is_running(pid: int) -> bool:
    return state_of(pid) != ""


@pytest.mark.parametrize("library", ["zrpc", "torch"])
def test_a_mesh_can_be_paused_and_resumed_and_leaves_nothing_behind(
    starter: Starter, tiny: Sampling, library: str
) -> None:
    with Mesh(starter, library, 2) as mesh:
        pids, directory = children(starter.pid), mesh.directory
        assert mesh.join_seconds > 0
        assert directory.exists()
        mesh.pause()
        until(lambda: [state_of(pid) for pid in children(starter.pid)] == ["T"] * 2)
        mesh.resume()
        until(lambda: "T" not in [state_of(pid) for pid in children(starter.pid)])
        assert mesh.measure("calls:empty", (), tiny, 30).value > 0
        mesh.pause()  # it can be shut down all the same
    assert mesh.shutdown_errors == []
    assert not directory.exists()
    assert not [pid for pid in pids if is_running(pid)]


def test_a_workload_that_hangs_is_killed(starter: Starter) -> None:
    before, pids = time.monotonic(), list[int]()

    def hang() -> None:
        with Mesh(starter, "zrpc", 2) as mesh:
            pids.extend(children(starter.pid))
            mesh.measure("calls:empty", (), ENDLESS, 0.2)

    with pytest.raises(HungError, match=r"no result within 0\.2 s"):
        hang()
    assert time.monotonic() - before < 10
    assert not [pid for pid in pids if is_running(pid)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_dies_is_noticed_before_the_deadline(starter: Starter, rank: int) -> None:
    def die() -> None:
        with Mesh(starter, "zrpc", 2) as mesh:
            threading.Timer(0.2, os.kill, (children(starter.pid)[rank], signal.SIGKILL)).start()
            mesh.measure("calls:peer_busy", (), ENDLESS, 60)

    with pytest.raises(MeshError, match=f"worker{rank} was killed by SIGKILL"):
        die()


def test_workers_that_do_not_leave_are_killed_and_reported(starter: Starter) -> None:
    with Mesh(starter, "zrpc", 2) as mesh:
        pids = children(starter.pid)
        os.kill(pids[1], signal.SIGSTOP)
        mesh.timeout = 0.3
    assert mesh.shutdown_errors == [
        "zrpc could not be shut down: the workers did not leave within 0.3 s"
    ]
    assert not [pid for pid in pids if is_running(pid)]


@pytest.fixture
def borrowed_starter(starter: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "warm_starter", lambda: nullcontext(starter))


@pytest.mark.usefixtures("borrowed_starter")
def test_a_row_that_fails_does_not_affect_the_others(tiny: Sampling) -> None:
    group = Group("group", (BROKEN, GOOD), turns=2)
    run = Run([group], Settings(against=None, rounds=2, sampling=tiny))
    run.run(lambda *_: None)
    broken, good = run.results
    reasons = {each.reason for each in broken.failures("zrpc")}
    assert len(broken.failures("zrpc")) == 2
    assert reasons == {"AttributeError: module 'zrpc.bench.calls' has no attribute 'no_such'"}
    assert good.failures("zrpc") == []
    assert len(good.outcomes["zrpc"]) == 2
    assert run.notes == []


@pytest.mark.usefixtures("borrowed_starter")
def test_a_row_that_hangs_is_not_tried_in_the_next_round() -> None:
    settings = Settings(against=None, rounds=3, sampling=ENDLESS)
    run = Run([Group("group", (SLOW,), turns=1)], settings)
    before = time.monotonic()
    run.run(lambda *_: None)
    assert time.monotonic() - before < 15
    assert [each.reason for each in run.results[0].failures("zrpc")] == [
        "no result within 0.3 s"
    ] * 3
    # If no mesh starts, all rows fail.
    run = Run([Group("group", (GOOD, BROKEN))], Settings(against=None, rounds=1, mesh_timeout=0))
    run.run(lambda *_: None)
    reason = "at the start: the workers did not join within 0 s"
    assert [[each.reason for each in row.failures("zrpc")] for row in run.results] == [[reason]] * 2

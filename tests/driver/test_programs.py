"""Programs that start a mesh: however they are run, and however they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.programs import run_python
from tests.support.waiting import until
from zrpc.testing.procfs import state_of

SECONDS = 120.0
_PROGRAM = """\
print("begins")
import os, zrpc
factor = 3
def times(n):
    return factor * n
class Box:
    def __init__(self, value):
        self.value = value
mesh = zrpc.start_mesh(2)
print(zrpc.rpc_sync("worker1", times, args=(7,)))
print(type(zrpc.rpc_sync(0, Box, args=(1,))) is Box)
_ = zrpc.rpc_async("worker0", print, args=("last words",))
"""
_EXPECTED = ["begins", "21", "True", "[worker0] last words"]


@pytest.fixture
def runtime() -> Iterator[Path]:
    """Where meshes keep their files; at the end of the test nothing may be left there."""
    with tempfile.TemporaryDirectory(prefix="zrpc-test-") as directory:
        yield Path(directory)
        until(lambda: os.listdir(directory) == [], lambda: str(os.listdir(directory)))


def start(*command: str, runtime: Path, stdin: int = subprocess.PIPE) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, "ZRPC_RUNTIME_DIR": str(runtime), "PYTHONSTARTUP": ""},
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,  # one whose parent watches it can be suspended
    )


@pytest.mark.parametrize("way", ["stdin", "interactive"])  # docs/ has files, and another test -c
def test_a_program_needs_no_main_guard(way: str, runtime: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_PROGRAM)
    command = ["-"] if way == "stdin" else ["-i", "-q", str(script)]
    process = start(*command, runtime=runtime)
    out, err = process.communicate(_PROGRAM if way == "stdin" else "", SECONDS)
    assert process.returncode == 0, err
    assert sorted(out.splitlines()) == sorted(_EXPECTED)
    assert err.strip() in ("", ">>>")


_WITH_A_CHILD = """\
import multiprocessing, zrpc
mesh = zrpc.start_mesh(1)
child = multiprocessing.get_context("spawn").Process(target=print)
child.start()
child.join()
print(child.exitcode, zrpc.rpc_sync(0, max, args=(1, 2)))
"""


def test_a_child_that_runs_the_script_is_told_of_the_guard(runtime: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_WITH_A_CHILD)
    done = run_python(str(script), warm=True, ZRPC_RUNTIME_DIR=str(runtime))
    assert done.stdout.split() == ["1", "2"]
    assert "zrpc.start_mesh was called again by a process" in done.stderr


_SUSPENDED = """\
import os, zrpc
options = zrpc.ZmqRpcBackendOptions(heartbeat_timeout=2)
with zrpc.start_mesh(1, rpc_backend_options=options) as mesh:
    print(*mesh.pids.values(), flush=True)
    input()
    print(zrpc.rpc_sync(0, max, args=(1, 2)))
"""


def test_workers_are_suspended_with_the_driver(runtime: Path) -> None:
    process = start("-c", _SUSPENDED, runtime=runtime)
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    # Python handles a signal that comes just before a read begins only after it.
    until(lambda: state_of(process.pid) == "S")
    process.send_signal(signal.SIGTSTP)
    until(lambda: state_of(worker) == state_of(process.pid) == "T")
    time.sleep(4)  # longer than the time-out of heartbeats
    process.send_signal(signal.SIGCONT)
    out, err = process.communicate("\n", SECONDS)
    assert (out, err) == ("2\n", "")


_LEFT_BY_FORCE = """\
import os, re, subprocess, sys, time, zrpc
mesh = zrpc.start_mesh(2)
def child():
    return subprocess.Popen(["sleep", "1000"], start_new_session=True).pid
def hold_the_lock():
    re.match("(a?){40}b", "a" * 40)
pids = [*mesh.pids.values(), zrpc.rpc_sync("worker0", child)]
_ = zrpc.rpc_async("worker1", hold_the_lock, timeout=0)
print(*pids, flush=True)
sys.stdin.readline()
"""


def test_nothing_outlives_a_driver_that_is_killed(runtime: Path) -> None:
    process = start("-c", _LEFT_BY_FORCE, runtime=runtime)
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 3
    process.kill()
    process.communicate(timeout=SECONDS)
    until(lambda: all(state_of(pid) == "" for pid in pids))

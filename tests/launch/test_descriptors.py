"""Processes that are started with some of descriptors 0 to 2 closed, or that have many."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.conftest import Write
from tests.support.programs import run_python

CLOSINGS = ["<&-", ">&-", "2>&-", "<&- >&-", "<&- >&- 2>&-"]
# Prints so many lines that a line end would be read as a signal if it could be.
_WORKER = """
import os, sys
from pathlib import Path

for line in range(20):
    print(line)
    print(line, file=sys.stderr)
assert sys.stdin.read() == ""
Path(sys.argv[1], os.environ["RANK"]).touch()
"""
_START_PROCESS = """
import sys, zrpc.launch as launch

with launch.Starter(sys.argv[1], preload=()) as starter:
    pid = starter.spawn(launch.Task.script(sys.argv[2], sys.argv[3:]))
    assert starter.wait(pid, timeout=30) == 0
"""
_WRITE_DESCRIPTORS = """
import os, sys

with open(sys.argv[1], "w") as file:
    file.write(" ".join(os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)))
"""


def run(closing: str, *command: str) -> tuple[int, str]:
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closing}', "sh", sys.executable, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("closing", CLOSINGS)
def test_a_launch_runs_with_closed_descriptors(closing: str, write: Write, tmp_path: Path) -> None:
    """Output to a closed descriptor is discarded; the others get all of theirs."""
    command = ["-m", "zrpc.cli", "launch", "--nprocs=2", "--start-method=spawn"]
    code, output = run(closing, *command, write(_WORKER), str(tmp_path))
    assert code == 0, output
    assert {path.name for path in tmp_path.iterdir()} >= {"0", "1"}
    shown = 40 * ((" >&-" not in f" {closing}") + ("2>&-" not in closing))
    assert len(output.splitlines()) == shown


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_started_process_has_no_socket_of_its_starter_as_a_standard_stream(
    method: str, write: Write, tmp_path: Path
) -> None:
    starter, report = write(_START_PROCESS, "starter.py"), tmp_path / "report"
    script = write(_WRITE_DESCRIPTORS, "script.py")
    code, _ = run("<&- >&- 2>&-", starter, method, script, str(report))
    assert (code, report.read_text()) == (0, " ".join(["/dev/null"] * 3))


def test_a_child_starts_under_a_low_limit_of_descriptors() -> None:
    """`move_descriptors` needs no number far above those of the targets."""
    code = """
import os, resource
from zrpc.launch.descriptors import move_descriptors

resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
reading, writing = os.pipe()
move_descriptors([writing], [5])
os.write(5, b"moved")
assert os.read(reading, 9) == b"moved"
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr

"""Processes that are started with some of descriptors 0 to 2 closed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

CLOSINGS = ["<&-", ">&-", "2>&-", "<&- >&-", "<&- >&- 2>&-"]
# Prints enough lines for one of their ends to be read as a signal, where it could be.
_WORKER = """
import os, sys
from pathlib import Path

for line in range(20):
    print(line)
    print(line, file=sys.stderr)
assert sys.stdin.read() == ""
Path(sys.argv[1], os.environ["RANK"]).touch()
"""
_STARTS = """
import sys, zrpc.launch as launch

with launch.make_starter(sys.argv[1], preload=()) as starter:
    pid = starter.spawn(launch.Task.script(sys.argv[2], sys.argv[3:]))
    assert starter.wait(pid, timeout=30) == 0
"""
_TELLS = """
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
def test_the_command(closing: str, write: Callable[..., str], tmp_path: Path) -> None:
    """What would go to a closed one is dropped; the others have it all."""
    command = ["-m", "zrpc.cli", "launch", "--nprocs=2", "--start-method=spawn"]
    code, output = run(closing, *command, write(_WORKER), str(tmp_path))
    assert code == 0, output
    assert {path.name for path in tmp_path.iterdir()} >= {"0", "1"}
    shown = 40 * ((" >&-" not in f" {closing}") + ("2>&-" not in closing))
    assert len(output.splitlines()) == shown


@pytest.mark.parametrize("closing", ["<&- >&-", "<&- >&- 2>&-"])
def test_a_program_that_launches(closing: str, write: Callable[..., str], tmp_path: Path) -> None:
    code = "import sys; from zrpc.launch import Job, launch; sys.exit(launch(Job(sys.argv[1], "
    code += "sys.argv[2:], nprocs=2, preload=())))"
    assert run(closing, "-c", code, write(_WORKER), str(tmp_path))[0] == 0
    assert {path.name for path in tmp_path.iterdir()} >= {"0", "1"}


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_started_process_has_none_of_its_starters_sockets_there(
    method: str, write: Callable[..., str], tmp_path: Path
) -> None:
    starts, tells, told = write(_STARTS, "starts.py"), write(_TELLS, "tells.py"), tmp_path / "told"
    code, _ = run("<&- >&- 2>&-", starts, method, tells, str(told))
    assert (code, told.read_text()) == (0, " ".join(["/dev/null"] * 3))

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable

import pytest

from tests.examples.example_commands import EXAMPLES, Commands, Outcome, finish

Launch = Callable[..., Outcome]
LEARNED = re.compile(r"^\[0\] Learned: (\d+)% of the answers are right after \d+ steps\.$", re.M)
STEP = re.compile(r"\[0\] step +(\d+) +reward ([\d.]+) .*")


def test_learns_from_rewards(launch: Launch) -> None:
    # Answers at random would be right in 1 of 144 cases.
    outcome = launch("async_rl", 4, "--goal", "0.3", deadline=400)
    assert outcome.code == 0, outcome
    assert "Traceback" not in outcome.err
    *lines, last = outcome.out.splitlines()
    assert [each for each in lines if not STEP.fullmatch(each)] == []
    learned = LEARNED.match(last)
    assert learned is not None, outcome
    assert int(learned[1]) >= 30


@pytest.mark.parametrize(
    ("killed", "lost"), [("rollout2", "worker rollout2"), ("server", "the actor Server on server")]
)
def test_goes_on_when_a_worker_is_killed(commands: Commands, killed: str, lost: str) -> None:
    options = ("--max-restarts", "1", EXAMPLES / "async_rl.py", "--goal", "2", "--max-steps", "200")
    process = commands.launch(3, *options)
    assert process.stdout is not None
    assert "step   25" in process.stdout.readline()
    os.kill(pid_of(killed), signal.SIGKILL)
    outcome = finish(process, 400)
    assert outcome.code == 0, outcome
    assert f"lost rollout2: {lost}" in outcome.out
    steps = [int(found[1]) for found in map(STEP.match, outcome.out.splitlines()) if found]
    assert steps[-1] == 200  # only the worker that has taken the place can have sent the answers


def pid_of(name: str) -> int:
    """Returns the process id of a worker in the mesh of three workers."""
    command = ["zrpc", "stacks", "--json", name]
    shown = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    (mesh,) = [each["workers"] for each in shown["meshes"] if len(each["workers"]) == 3]
    (pid,) = [worker["pid"] for worker in mesh if worker["name"] == name]
    return int(pid)

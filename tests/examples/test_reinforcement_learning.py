"""Examples of actors, observers and generators that learn from rewards."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.examples.example_commands import (
    EXAMPLES,
    Commands,
    Launch,
    RunPlainly,
    finish,
    number_in,
)

# async_rl.py

STEP = re.compile(r"\[0\] step +(\d+) +reward ([\d.]+) .*")


def test_actors_learn_from_rewards(launch: Launch) -> None:
    # Answers at random would be right in 1 of 144 cases.
    *lines, last = launch("async_rl", 4, "--goal", "0.3").splitlines()
    assert [each for each in lines if not STEP.fullmatch(each)] == []
    learned = r"^\[0\] Learned: (\d+)% of the answers are right after \d+ steps\.$"
    assert number_in(learned, last) >= 30


@pytest.mark.parametrize(
    ("killed", "lost"), [("rollout2", "worker rollout2"), ("server", "the actor Server on server")]
)
def test_actors_go_on_when_a_worker_is_killed(commands: Commands, killed: str, lost: str) -> None:
    options = ("--max-restarts", "1", EXAMPLES / "async_rl.py", "--goal", "2", "--max-steps", "200")
    process = commands.launch(3, *options)
    assert process.stdout is not None
    assert "step   25" in process.stdout.readline()
    os.kill(pid_of(killed), signal.SIGKILL)
    outcome = finish(process)
    assert outcome.returncode == 0, outcome
    assert f"lost rollout2: {lost}" in outcome.stdout
    steps = [int(found[1]) for found in map(STEP.match, outcome.stdout.splitlines()) if found]
    assert steps[-1] == 200  # only the worker that has taken the place can have sent the answers


def pid_of(name: str) -> int:
    """Returns the process id of a worker in the mesh of three workers."""
    command = ["zrpc", "stacks", "--json", name]
    shown = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    (mesh,) = [each["workers"] for each in shown["meshes"] if len(each["workers"]) == 3]
    (pid,) = [worker["pid"] for worker in mesh if worker["name"] == name]
    return int(pid)


# reinforce_cartpole.py

CARTPOLE = EXAMPLES / "reinforce_cartpole.py"
SOLVED = re.compile(
    r"^(?:\[0\] )?Solved: the running reward passed ([\d.]+) after (\d+ episodes)", re.M
)


def test_cartpole_is_solved(launch: Launch) -> None:
    # A lower threshold than the environment's own, which takes 50,000 steps at least.
    out = launch("reinforce_cartpole", 4, "--seed", "36", "--threshold", "60")
    # Standard output is a pipe: progress comes as plain lines.
    line = re.compile(r"\[0\] episode +\d+   steps +[\d,]+   running reward +[\d.]+")
    *lines, last = out.splitlines()
    assert lines, out
    assert [each for each in lines if not line.fullmatch(each)] == []
    solved = SOLVED.match(last)
    assert solved is not None, out
    assert solved[1] == "60"


def test_the_same_seed_gives_the_same_run(run_plainly: RunPlainly) -> None:
    def play(seed: str) -> str:
        outcome = run_plainly(4, CARTPOLE, "--max-episodes", "15", "--seed", seed)[0]
        assert "Not solved" in outcome.stderr, outcome
        return outcome.stdout

    run = play("7")
    assert "episode    15" in run
    assert play("7") == run
    assert play("3") != run


def test_cartpole_stops_at_ctrl_c(commands: Commands) -> None:
    process = commands.launch(4, CARTPOLE, "--threshold", "501")
    assert process.stdout is not None
    assert "episode" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    outcome = finish(process)
    assert outcome.returncode == 130, outcome
    assert time.monotonic() - began < 10


def test_it_says_what_to_install_if_gymnasium_is_missing(
    run_plainly: RunPlainly, tmp_path: Path
) -> None:
    # Python refuses to import what is None there, even if it has been imported before.
    without = tmp_path / "without.py"
    without.write_text(
        "import runpy, sys\n"
        "sys.modules['gymnasium'] = None\n"
        "runpy.run_path(sys.argv[1], run_name='__main__')\n"
    )
    [outcome] = run_plainly(2, without, CARTPOLE, started=1)
    assert outcome.returncode == 1
    assert "pip install gymnasium rich" in outcome.stderr
    assert "Traceback" not in outcome.stderr


# worker_group.py


def check_rewards(out: str) -> None:
    rewards = [float(x) for x in re.findall(r"reward ([\d.]+)$", out, re.M)]
    assert len(rewards) == 6, out
    assert rewards[-1] > 0.7 > 0.5 > rewards[0]
    assert "all 2 trainers have the same weights: True" in out


def test_trainers_learn_from_what_generators_answer(launch: Launch) -> None:
    check_rewards(launch("worker_group", 4))


def test_any_worker_can_be_the_controller(commands: Commands) -> None:
    outcome = finish(commands.launch(5, EXAMPLES / "worker_group.py", "--controller", "generator1"))
    assert outcome.returncode == 0, outcome
    check_rewards(outcome.stdout)
    assert all(line.startswith("[3] ") for line in outcome.stdout.splitlines())

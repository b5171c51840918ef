from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.examples.example_commands import EXAMPLES, Commands, Outcome, finish

Launch = Callable[..., Outcome]
RunPlainly = Callable[..., list[Outcome]]
SOLVED = re.compile(
    r"^(?:\[0\] )?Solved: the running reward passed ([\d.]+) after (\d+ episodes)", re.M
)


def test_is_solved(launch: Launch) -> None:
    # A lower threshold than the environment's own, which takes 50,000 steps at least.
    outcome = launch("reinforce_cartpole", 4, "--seed", "36", "--threshold", "60", deadline=400)
    assert outcome.code == 0, outcome
    assert "Traceback" not in outcome.err
    # Standard output is a pipe: progress comes as plain lines.
    line = re.compile(r"\[0\] episode +\d+   steps +[\d,]+   running reward +[\d.]+")
    *lines, last = outcome.out.splitlines()
    assert lines, outcome
    assert [each for each in lines if not line.fullmatch(each)] == []
    solved = SOLVED.match(last)
    assert solved is not None, outcome
    assert solved[1] == "60"


def test_the_same_seed_gives_the_same_run(run_plainly: RunPlainly) -> None:
    def play(seed: str) -> str:
        script = (EXAMPLES / "reinforce_cartpole.py", "--max-episodes", "15", "--seed", seed)
        outcome = run_plainly(4, *script)[0]
        assert "Not solved" in outcome.err, outcome
        return outcome.out

    run = play("7")
    assert "episode    15" in run
    assert play("7") == run
    assert play("3") != run


def test_one_observer_is_enough(run_plainly: RunPlainly) -> None:
    outcome = run_plainly(2, EXAMPLES / "reinforce_cartpole.py", "--threshold", "40")[0]
    assert SOLVED.search(outcome.out), outcome


def test_stops_at_ctrl_c(commands: Commands) -> None:
    process = commands.launch(4, EXAMPLES / "reinforce_cartpole.py", "--threshold", "501")
    assert process.stdout is not None
    assert "episode" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    outcome = finish(process)
    assert outcome.code == 130, outcome
    assert time.monotonic() - began < 10


def test_says_what_to_install_if_gymnasium_is_missing(commands: Commands, tmp_path: Path) -> None:
    # Python refuses to import what is None there, even if it has been imported before.
    without = tmp_path / "without.py"
    without.write_text(
        "import runpy, sys\n"
        "sys.modules['gymnasium'] = None\n"
        "runpy.run_path(sys.argv[1], run_name='__main__')\n"
    )
    script = EXAMPLES / "reinforce_cartpole.py"
    outcome = finish(commands.start(without, script, RANK="0", WORLD_SIZE="2"))
    assert outcome.code == 1
    assert "pip install gymnasium rich" in outcome.err
    assert "Traceback" not in outcome.err

from __future__ import annotations

import re
from collections.abc import Callable

from tests.examples.example_commands import EXAMPLES, Commands, Outcome, finish

DEADLINE = 240.0


def check(outcome: Outcome) -> None:
    assert outcome.code == 0, outcome
    rewards = [float(x) for x in re.findall(r"reward ([\d.]+)$", outcome.out, re.M)]
    assert len(rewards) == 6, outcome
    assert rewards[-1] > 0.7 > 0.5 > rewards[0]
    assert "all 2 trainers have the same weights: True" in outcome.out
    assert "Traceback" not in outcome.err


def test_trainers_learn_from_what_generators_answer(launch: Callable[..., Outcome]) -> None:
    check(launch("worker_group", 4, deadline=DEADLINE))


def test_any_worker_can_be_the_controller(commands: Commands) -> None:
    script = EXAMPLES / "worker_group.py"
    outcome = finish(commands.launch(5, script, "--controller", "generator1"), DEADLINE)
    check(outcome)
    assert all(line.startswith("[3] ") for line in outcome.out.splitlines())


def test_a_controller_that_does_not_exist_is_refused(commands: Commands) -> None:
    script = EXAMPLES / "worker_group.py"
    command = commands.start(script, "--controller", "judge", RANK="0", WORLD_SIZE="3")
    outcome = finish(command)
    assert outcome.code == 2, outcome
    assert "expected one of trainer0, trainer1, generator0, but got judge" in outcome.err

from __future__ import annotations

import re
from collections.abc import Callable

from tests.examples.example_commands import EXAMPLES, Outcome

DEADLINE = 240.0


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"step +\d+ +loss ([\d.]+)$", output, re.M)]


def test_learns_what_one_process_would_learn(launch: Callable[..., Outcome]) -> None:
    outcome = launch("distributed_rnn", 2, "--check", deadline=DEADLINE)
    assert outcome.code == 0, outcome
    values = losses(outcome.out)
    assert len(values) == 15
    assert values[-1] < 0.65 * values[0]
    difference = re.search(r"largest difference of a loss to one process: (\S+)", outcome.out)
    assert difference is not None, outcome
    assert float(difference[1]) < 1e-4
    assert "Traceback" not in outcome.err


def test_runs_without_a_launcher(run_plainly: Callable[..., list[Outcome]]) -> None:
    script = EXAMPLES / "distributed_rnn.py"
    trainer, parameters = run_plainly(2, script, "--steps", "20", deadline=DEADLINE)
    assert len(losses(trainer.out)) == 2, trainer
    assert (parameters.code, parameters.out) == (0, "")
    assert "Traceback" not in parameters.err

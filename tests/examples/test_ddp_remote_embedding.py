from __future__ import annotations

import re
from collections.abc import Callable

from tests.examples.example_commands import EXAMPLES, Outcome

DEADLINE = 240.0


def check(output: str) -> None:
    found = re.findall(r"(\w+): largest difference to one process: (\S+)$", output, re.M)
    differences = {what: float(largest) for what, largest in found}
    assert sorted(differences) == ["loss", "table", "trainer0", "trainer1"], output
    assert max(differences.values()) < 1e-4


def test_two_trainers_learn_what_one_process_would_learn(launch: Callable[..., Outcome]) -> None:
    outcome = launch("ddp_remote_embedding", 4, "--check", deadline=DEADLINE)
    assert outcome.code == 0, outcome
    check(outcome.out)
    for trainer in (0, 1):
        losses = re.findall(rf"^\[{trainer}\] step +\d+ +loss ([\d.]+)$", outcome.out, re.M)
        assert len(losses) == 6
        assert float(losses[-1]) < 0.4 * float(losses[0])
    assert "Traceback" not in outcome.err


def test_runs_under_torchrun(torchrun: Callable[..., Outcome]) -> None:
    outcome = torchrun(4, EXAMPLES / "ddp_remote_embedding.py", "--check", "--steps", "50")
    assert outcome.code == 0, outcome
    check(outcome.out)

from __future__ import annotations

import re
from collections.abc import Callable

from tests.examples.example_commands import Outcome

DEADLINE = 240.0


def check(outcome: Outcome, trainers: int) -> None:
    assert outcome.code == 0, outcome
    ends = re.findall(r"trainer\d+: the loss is ([\d.]+) at the end$", outcome.out, re.M)
    assert len(ends) == trainers
    # That of the last one to end: the others may have ended before most of its updates.
    assert min(map(float, ends)) < 0.8
    found = re.search(r"right for ([\d.]+)% of unseen lines before, ([\d.]+)% after", outcome.out)
    assert found is not None, outcome
    assert float(found[2]) > max(70, 2 * float(found[1]))


def test_all_trainers_train_the_servers_model(launch: Callable[..., Outcome]) -> None:
    outcome = launch("parameter_server", 4, "--steps", "150", deadline=DEADLINE)
    check(outcome, trainers=3)
    for rank in (1, 2, 3):
        losses = re.findall(rf"^\[{rank}\] step +\d+ +loss ([\d.]+)$", outcome.out, re.M)
        assert len(losses) == 3
        assert float(losses[-1]) < 0.6 * float(losses[0])
    assert "Traceback" not in outcome.err

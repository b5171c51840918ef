"""Some rounds in which a worker is lost; CONTRIBUTING.md says how to run them for longer."""

from __future__ import annotations

import pytest

from tests.kills.plan import FAULTS, draw
from tests.kills.rounds import run_round

SEED = 1


@pytest.mark.system
@pytest.mark.parametrize("fault", ["killed", "stopped, long", "interrupted, leaves"])
def test_faults_of_a_worker(fault: str) -> None:
    """No call hangs or has a wrong result, survivors agree and go on, and nothing is left."""
    plan = next(p for p in (draw(SEED, n) for n in range(len(FAULTS))) if p.fault == fault)
    outcome = run_round(plan)
    assert not outcome.wrong, f"{plan}:\n" + "\n".join(outcome.wrong)
    assert sum(outcome.counts.values())

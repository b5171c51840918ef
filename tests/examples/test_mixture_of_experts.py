from __future__ import annotations

import re
from collections.abc import Callable

from tests.examples.example_commands import Outcome

DEADLINE = 240.0


def test_learns_what_one_process_would_learn(launch: Callable[..., Outcome]) -> None:
    nprocs, steps = 5, 100
    options = ("--check", "--steps", str(steps))
    outcome = launch("mixture_of_experts", nprocs, *options, deadline=DEADLINE)
    assert outcome.code == 0, outcome
    losses = [float(x) for x in re.findall(r"step +\d+ +loss ([\d.]+)$", outcome.out, re.M)]
    assert len(losses) == steps // 50
    assert losses[-1] < 0.5 * losses[0]
    difference = re.search(r"largest difference of a loss to one process: (\S+)", outcome.out)
    assert difference is not None, outcome
    assert float(difference[1]) < 1e-9
    shares = re.findall(r"expert\d was given (\d+)% of the rows", outcome.out)
    assert len(shares) == nprocs - 1
    assert min(map(int, shares)) > 5  # all experts have learned something
    assert "Traceback" not in outcome.err

from __future__ import annotations

import re
from collections.abc import Callable

from tests.examples.example_commands import Outcome


def test_the_loss_falls_below_the_target(launch: Callable[..., Outcome]) -> None:
    outcome = launch("async_parameter_server", 4, "--target", "0.006")
    assert outcome.code == 0, outcome
    losses = [float(loss) for loss in re.findall(r"updates, loss ([\d.]+)", outcome.out)]
    assert losses[0] > 2 * losses[-1]
    assert losses[-1] <= 0.006
    gradients = re.findall(r"^\[0\] trainer\d: (\d+) gradients", outcome.out, re.M)
    last = re.search(r"^\[0\] Below 0.006 after (\d+) updates", outcome.out, re.M)
    assert last is not None, outcome
    assert sum(map(int, gradients)) == int(last[1])  # none was lost or applied twice
    assert len(gradients) == 3
    assert min(map(int, gradients)) > 0

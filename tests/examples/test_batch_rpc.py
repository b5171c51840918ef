from __future__ import annotations

import re
from collections.abc import Callable

from tests.examples.example_commands import Outcome


def check(lines: list[str], trainers: int, steps: int) -> None:
    """Checks both runs: their losses fall, and they made the expected number of updates."""
    heads = [i for i, line in enumerate(lines) if line.startswith("batches")]
    runs = [lines[heads[0] : heads[1]], lines[heads[1] :]]
    for batch_size, (head, *losses, last) in zip((trainers, 1), runs, strict=True):
        assert head.startswith(f"batches of {batch_size}: {steps} gradients")
        values = [float(loss.split()[1]) for loss in losses]
        assert len(values) == 5
        assert values[-1] < 0.6 * values[0]
        updates = re.match(r"  (\d+) updates in [\d.]+ s, accuracy [\d.]+%", last)
        assert updates is not None
        assert int(updates[1]) == steps * trainers // batch_size


def test_makes_one_update_from_the_gradients_of_all_trainers(
    launch: Callable[..., Outcome],
) -> None:
    outcome = launch("batch_rpc", 4, "--steps", "300")
    assert outcome.code == 0, outcome
    check([line.removeprefix("[0] ") for line in outcome.out.splitlines()], trainers=3, steps=300)

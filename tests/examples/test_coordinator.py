from __future__ import annotations

import re
from collections.abc import Callable

from tests.examples.example_commands import Outcome

POINTS = 100_000
DATA = POINTS * 6 * 4  # five columns of x and one of y, in float32


def tensor_bytes(output: str) -> dict[str, int]:
    found = re.findall(r"(worker\d) received +([\d,]+) bytes of tensors", output)
    return {name: int(count.replace(",", "")) for name, count in found}


def test_no_data_goes_through_the_coordinator(launch: Callable[..., Outcome]) -> None:
    outcome = launch("coordinator", 5, "--points", str(POINTS))
    assert outcome.code == 0, outcome
    assert re.search(r"largest error of the 5 weights: 0\.00\d+$", outcome.out, re.M)
    assert tensor_bytes(outcome.out) == {
        "worker0": 0,
        "worker1": 0,
        "worker2": DATA,
        "worker3": DATA,
        "worker4": (5 * 5 + 5) * 4,
    }

"""Mutants of a protocol without I/O: a test of it must notice that they are broken."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any


def assert_detected(
    mutant: type, steps: Sequence[Any], run: Callable[..., Any], violation: type[Exception]
) -> None:
    """Fails unless a schedule of these steps makes three members of ``mutant`` go wrong.

    The schedules are random, of a fixed seed: how soon hypothesis finds one is not the point.
    """
    source = random.Random(0)
    for seed in range(3000):
        schedule = [
            (source.choice(steps), source.randrange(12), source.randrange(12)) for _ in range(40)
        ]
        try:
            run(3, schedule, seed, mutant)
        except (violation, KeyError):
            return
    raise AssertionError(f"no schedule shows that {mutant.__name__} is broken")

"""Names against a network that reorders, repeats and loses messages, and workers that die."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.services.names.simulation import ALL, WITHOUT_LOSSES, run, schedules

thorough = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
SIZES = st.integers(1, 5)
SEEDS = st.integers(0, 2**16)


@pytest.mark.system
@thorough
@given(size=SIZES, schedule=schedules(ALL), seed=SEEDS)
def test_a_name_never_has_two_holders_and_every_claim_ends(
    size: Any, schedule: Any, seed: Any
) -> None:
    run(size, schedule, seed)


@pytest.mark.system
@thorough
@given(size=SIZES, schedule=schedules(WITHOUT_LOSSES[:-1], 60), seed=SEEDS)
def test_one_claim_of_a_name_is_granted_and_the_others_are_told_by_whom(
    size: Any, schedule: Any, seed: Any
) -> None:
    world = run(size, schedule, seed)
    names = [name for name, _ in world.grants]
    assert len(names) == len(set(names))
    assert world.ended_claims == sum(kind == "claim" for kind, _, _ in schedule)

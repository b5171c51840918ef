"""Some rounds of faults over three hosts; CONTRIBUTING.md says how to run them for longer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.partitions.plan import FAULTS, draw
from tests.partitions.rounds import Hosts, hosts, run_round

# One with a fault that nobody may notice, one with a cut, and one with a host that vanishes.
ROUNDS = ("one way lost, short", "one way lost, long", "host vanishes")
SEED = 1


@pytest.fixture(scope="module")
def where() -> Iterator[Hosts]:
    with hosts() as where:
        yield where


@pytest.mark.system
@pytest.mark.parametrize("fault", ROUNDS)
def test_faults_of_the_network(where: Hosts, fault: str) -> None:
    """No call hangs or has a wrong result, survivors go on, and nothing is left."""
    plan = next(p for p in (draw(SEED, n) for n in range(len(FAULTS))) if p.fault == fault)
    outcome = run_round(plan, where)
    assert not outcome.wrong, f"{plan}:\n" + "\n".join(outcome.wrong)
    assert sum(outcome.counts.values())


def test_each_fault_is_drawn_at_each_moment() -> None:
    plans = [draw(SEED, number) for number in range(400)]
    assert {plan.fault for plan in plans[: len(FAULTS)]} == set(FAULTS)
    assert {(plan.fault, plan.moment) for plan in plans} >= {
        (fault, moment) for fault in FAULTS for moment in ("work", "init", "shutdown")
    }
    assert draw(SEED, 7) == plans[7]


def test_which_workers_a_fault_separates() -> None:
    for number in range(200):
        plan = draw(SEED, number)
        ranks = range(len(plan.hosts))
        separated = [(a, b) for a in ranks for b in ranks if plan.apart(a, b)]
        assert all(plan.apart(b, a) for a, b in separated)
        assert bool(separated) == plan.may_be_noticed
        if not plan.fault.startswith(("stopped", "killed")):
            assert all(plan.hosts[a] != plan.hosts[b] for a, b in separated)

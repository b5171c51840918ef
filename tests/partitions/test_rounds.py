"""Some rounds of faults over three hosts; CONTRIBUTING.md says how to run them for longer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.partitions.plan import FAULTS, draw
from tests.partitions.rounds import Hosts, hosts, run_round

# One with a fault that nobody may notice, some with a cut, and one with a host that vanishes. In
# the last, two workers join an elastic mesh.
ROUNDS = {
    "one way lost, short": 0,
    "one way lost, long": 0,
    "host vanishes": 0,
    "flapping": 0,
    "cut, long": 2,
}
SEED = 1


@pytest.fixture(scope="module")
def where() -> Iterator[Hosts]:
    with hosts() as where:
        yield where


@pytest.mark.system
@pytest.mark.parametrize(("fault", "newcomers"), ROUNDS.items())
def test_faults_of_the_network(where: Hosts, fault: str, newcomers: int) -> None:
    """No call hangs or has a wrong result, survivors go on, and nothing is left."""
    plans = (draw(SEED, number) for number in itertools.count())
    plan = next(p for p in plans if (p.fault, p.newcomers) == (fault, newcomers))
    outcome = run_round(plan, where)
    assert not outcome.wrong, f"{plan}:\n" + "\n".join(outcome.wrong)
    assert sum(outcome.counts.values())


def test_each_fault_is_drawn_at_each_moment() -> None:
    plans = [draw(SEED, number) for number in range(500)]
    assert {plan.fault for plan in plans[: len(FAULTS)]} == set(FAULTS)
    assert {(plan.fault, plan.moment) for plan in plans} >= {
        (fault, moment) for fault in FAULTS for moment in ("work", "init", "shutdown")
    }
    assert {plan.fault for plan in plans if plan.newcomers} == set(FAULTS)
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


def test_which_newcomers_must_be_admitted() -> None:
    """Those that reach the store and all the members that other members reach."""
    for number in range(500):
        plan = draw(SEED, number)
        for rank in range(plan.founders.stop, len(plan.hosts)):
            alone = plan.victim in (plan.hosts[rank], plan.hosts[0])
            if plan.fault == "cut, short":
                assert plan.must_join(rank)
            elif plan.fault == "cut, long" and rank == plan.founders.stop:
                assert plan.must_join(rank) != alone

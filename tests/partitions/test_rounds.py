"""Some rounds of faults over three hosts; CONTRIBUTING.md says how to run them for longer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.partitions.plan import draw
from tests.partitions.rounds import Hosts, hosts, run_round

# One with a fault that nobody may notice, some with a cut, and one with a host that vanishes. In
# the first and the last, two workers join an elastic mesh.
ROUNDS = {
    "cut, short": 2,
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

"""How long threads may keep the interpreter's lock: when it is set, and when restored."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from tests.support.forks import exit_code, fork
from zrpc.agent.agent import Agent
from zrpc.agent.service import Service
from zrpc.bootstrap import join_mesh
from zrpc.runtime.switch_interval import SwitchInterval
from zrpc.testing import local_mesh

pytestmark = pytest.mark.usefixtures("no_leaks")

BEFORE = 0.004
SECONDS = [0, 1e-9, 0.001, 0.002, 0.003, 0.5]  # 0 leaves the setting alone


@pytest.fixture(autouse=True)
def before() -> Iterator[None]:
    """Sets the interval at the start of a test."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(BEFORE)
    yield
    sys.setswitchinterval(usual)


def current() -> Any:
    return pytest.approx(sys.getswitchinterval(), abs=1e-6)


def ask(seconds: float) -> SwitchInterval:
    interval = SwitchInterval(seconds)
    interval.ask()
    return interval


steps = st.tuples(st.sampled_from(["ask", "give back"]), st.integers(0, len(SECONDS) - 1))


@pytest.mark.system
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(steps, max_size=30))
def test_the_smallest_interval_that_is_asked_for_holds(schedule: list[Any]) -> None:
    intervals, asked = [SwitchInterval(each) for each in SECONDS], set()
    for what, number in [*schedule, *(("give back", each) for each in range(len(SECONDS)))]:
        if what == "ask":
            intervals[number].ask()
            asked.add(SECONDS[number] or BEFORE)
        else:
            intervals[number].give_back()
            asked.discard(SECONDS[number])
        assert current() == min([BEFORE, *asked])


def test_an_interval_that_other_code_sets_stays_until_one_more_asks() -> None:
    one, other = ask(0.001), ask(0.002)
    sys.setswitchinterval(0.003)
    one.give_back()
    assert current() == 0.003
    one.ask()
    assert current() == 0.001
    for each in (other, one):
        each.give_back()
    assert current() == 0.003
    sys.setswitchinterval(0.0025)
    one.give_back()
    assert current() == 0.0025
    ask(0.001).give_back()
    assert current() == 0.0025


def test_the_previous_interval_is_restored_to_the_microsecond() -> None:
    for microseconds in (0, 1, 3, 57, 299, 1001, 4999, 100_001):
        sys.setswitchinterval((microseconds + 0.5) * 1e-6)
        exactly = sys.getswitchinterval()
        for _ in range(3):
            ask(0.001).give_back()
            assert sys.getswitchinterval() == exactly


@pytest.mark.system
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_process_has_the_previous_interval() -> None:
    one = ask(0.001)

    def in_child() -> None:
        assert current() == BEFORE
        one.give_back()
        assert current() == BEFORE

    assert exit_code(fork(in_child)) == 0
    assert current() == 0.001
    one.give_back()


def test_a_mesh_sets_its_interval_until_its_last_worker_has_left() -> None:
    with local_mesh(2) as mesh:
        assert current() == 0.001
        with local_mesh(1, options={"switch_interval": 0.0005}):
            assert current() == 0.0005
        with local_mesh(1, options={"switch_interval": 0}):
            assert current() == 0.001
        mesh.agent(0).shutdown(graceful=False)
        assert current() == 0.001
        mesh.agent(1).shutdown(graceful=False)
        assert current() == BEFORE
        sys.setswitchinterval(0.002)
        mesh.agent(1).close()
        assert current() == 0.002


class Failure(Exception):
    pass


def fails(agent: Agent) -> None:
    raise Failure


class FailsToStart(Service):
    def after_turn(self) -> NoReturn:
        assert current() == 0.001
        raise Failure


class FailsAtTheEnd(Service):
    def close(self) -> None:
        raise Failure


def test_a_start_or_a_shutdown_that_fails_restores_the_interval() -> None:
    fixed: dict[str, Any] = {"rank": 0, "world_size": 1}
    for mesh in (fixed, {"rank": None, "world_size": None}):
        for service in (fails, FailsToStart):
            with pytest.raises(Failure):
                join_mesh("worker", store=HashStore(), services=[service], **mesh)
            assert current() == BEFORE
    agent = join_mesh("worker", store=HashStore(), services=[FailsAtTheEnd], **fixed)
    assert current() == 0.001
    with pytest.raises(Failure):
        agent.shutdown(graceful=False)
    assert current() == BEFORE

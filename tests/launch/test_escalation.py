from __future__ import annotations

import signal

import pytest

from zrpc.launch.escalation import Escalation, interrupt, kill, terminate


@pytest.mark.parametrize(("grace", "until_sigterm"), [(30.0, 3.0), (3.5, 3.0), (1.0, 0.5)])
def test_interrupt_takes_three_steps_within_the_grace_period(
    grace: float, until_sigterm: float
) -> None:
    stop = Escalation(interrupt(grace), now=100.0)
    taken = []
    while stop.next_at != float("inf"):
        now = stop.next_at
        assert stop.due(now - 0.001) == []
        taken += [(now, step.number, step.group) for step in stop.due(now)]
    assert taken == [
        (100.0, signal.SIGINT, True),
        (100.0 + until_sigterm, signal.SIGTERM, False),
        (100.0 + grace, signal.SIGKILL, True),
    ]


def test_without_a_grace_period_a_program_is_killed_at_once() -> None:
    taken = [step.number for step in Escalation(interrupt(0.0), now=0.0).due(now=0.0)]
    assert taken == [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]


def test_steps_that_are_left_can_be_postponed() -> None:
    stop = Escalation(interrupt(30.0), now=0.0)
    stop.due(now=1.0)
    stop.postpone(100.0)
    assert (stop.started_at, stop.next_at) == (100.0, 103.0)


def test_missed_steps_are_taken_together() -> None:
    stop = Escalation(terminate(1.0), now=0.0)
    assert [step.number for step in stop.due(50.0)] == [signal.SIGTERM, signal.SIGKILL]
    assert stop.due(60.0) == []


def test_kill_is_due_at_once() -> None:
    assert [step.number for step in Escalation(kill(), now=0.0).due(0.0)] == [signal.SIGKILL]

from __future__ import annotations

import signal

import pytest

from zrpc.launch.escalation import Escalation, interrupt, kill, terminate


@pytest.mark.parametrize(
    ("grace", "until_sigterm"), [(30.0, 3.0), (3.5, 3.0), (1.0, 0.5), (0.0, 0.0)]
)
def test_interrupt_takes_three_steps_within_the_grace_period_and_then_stops_waiting(
    grace: float, until_sigterm: float
) -> None:
    stop = Escalation(interrupt(grace), now=100.0)
    taken = []
    while (now := stop.next_at) < float("inf"):
        assert stop.due(now - 0.001) == []
        taken += [(now, step.number, step.group) for step in stop.due(now)]
    assert taken == [
        (100.0, signal.SIGINT, True),
        (100.0 + until_sigterm, signal.SIGTERM, False),
        (100.0 + grace, signal.SIGKILL, True),
        (110.0 + grace, 0, False),
    ]


def test_steps_that_are_left_can_be_postponed() -> None:
    stop = Escalation(interrupt(30.0), now=0.0)
    stop.due(now=0.0)
    stop.postpone(100.0)
    assert (stop.started_at, stop.next_at) == (100.0, 103.0)


def test_a_launcher_that_was_held_up_leaves_the_workers_their_time() -> None:
    stop = Escalation(terminate(1.0), now=0.0)
    for now, number in ((5.0, signal.SIGTERM), (100.0, signal.SIGKILL), (110.0, 0)):
        assert [step.number for step in stop.due(now)] == [number]
        assert stop.due(now + 0.5) == []
    assert [step.number for step in Escalation(kill(), now=0.0).due(0.0)] == [signal.SIGKILL]

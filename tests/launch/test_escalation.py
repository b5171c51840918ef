from __future__ import annotations

import signal

from zrpc.launch.escalation import Escalation, interrupt, kill, terminate


def test_interrupt_takes_three_steps_one_grace_period_apart() -> None:
    stop = Escalation(interrupt(3.0), now=100.0)
    taken = []
    while stop.next_at != float("inf"):
        now = stop.next_at
        assert stop.due(now - 0.001) == []
        taken += [(now, step.number, step.group) for step in stop.due(now)]
    assert taken == [
        (100.0, signal.SIGINT, True),
        (103.0, signal.SIGTERM, False),
        (106.0, signal.SIGKILL, True),
    ]


def test_missed_steps_are_taken_together() -> None:
    stop = Escalation(terminate(1.0), now=0.0)
    assert [step.number for step in stop.due(50.0)] == [signal.SIGTERM, signal.SIGKILL]
    assert stop.due(60.0) == []


def test_kill_is_due_at_once() -> None:
    assert [step.number for step in Escalation(kill(), now=0.0).due(0.0)] == [signal.SIGKILL]

"""When a thread spins: where messages came soon of late, and never for long."""

from __future__ import annotations

import pytest

from zrpc.spin import LONGEST_SPIN, Spin


@pytest.fixture
def spin():
    return Spin()


def wait(spin, seconds, times):
    for _ in range(times):
        spin.waited(seconds)


def test_messages_that_come_soon_are_looked_for(spin):
    wait(spin, LONGEST_SPIN / 10, 1000)
    assert spin.seconds == LONGEST_SPIN


def test_messages_that_come_late_are_slept_for(spin):
    wait(spin, LONGEST_SPIN * 2, 100)
    assert spin.seconds == 0.0


def test_an_idle_worker_sleeps_after_a_few_ticks(spin):
    wait(spin, LONGEST_SPIN / 10, 1000)
    wait(spin, 0.1, 3)
    assert spin.seconds == 0.0


def test_a_single_pause_changes_nothing(spin):
    wait(spin, LONGEST_SPIN / 10, 1000)
    wait(spin, 60.0, 1)
    assert spin.seconds == LONGEST_SPIN


@pytest.mark.parametrize("pause", [0.1, 3600.0])
def test_a_long_pause_is_forgotten_as_soon_as_a_short_one(spin, pause):
    wait(spin, pause, 100)
    wait(spin, LONGEST_SPIN / 10, 20)
    assert spin.seconds == LONGEST_SPIN

"""When a thread spins: if messages have been arriving soon, and never for long."""

from __future__ import annotations

import pytest

from zrpc.runtime.adaptive_spin import MAX_SPIN_SECONDS, AdaptiveSpin


@pytest.fixture
def spin() -> AdaptiveSpin:
    return AdaptiveSpin()


def wait(spin: AdaptiveSpin, seconds: float, times: int) -> None:
    for _ in range(times):
        spin.waited(seconds)


def test_short_waits_lead_to_spinning(spin: AdaptiveSpin) -> None:
    wait(spin, MAX_SPIN_SECONDS / 10, 1000)
    assert spin.seconds == MAX_SPIN_SECONDS


def test_long_waits_lead_to_sleeping(spin: AdaptiveSpin) -> None:
    wait(spin, MAX_SPIN_SECONDS * 2, 100)
    assert spin.seconds == 0.0


def test_an_idle_worker_sleeps_after_a_few_ticks(spin: AdaptiveSpin) -> None:
    wait(spin, MAX_SPIN_SECONDS / 10, 1000)
    wait(spin, 0.1, 3)
    assert spin.seconds == 0.0


def test_a_single_pause_does_not_stop_the_spinning(spin: AdaptiveSpin) -> None:
    wait(spin, MAX_SPIN_SECONDS / 10, 1000)
    wait(spin, 60.0, 1)
    assert spin.seconds == MAX_SPIN_SECONDS


@pytest.mark.parametrize("pause", [0.1, 3600.0])
def test_a_long_pause_is_forgotten_as_fast_as_a_short_one(spin: AdaptiveSpin, pause: float) -> None:
    wait(spin, pause, 100)
    wait(spin, MAX_SPIN_SECONDS / 10, 20)
    assert spin.seconds == MAX_SPIN_SECONDS

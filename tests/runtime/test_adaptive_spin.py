"""When a thread spins: if messages have been arriving soon and nobody wants its core; not long."""

from __future__ import annotations

import pytest

from zrpc.runtime.adaptive_spin import MAX_SPIN_SECONDS, AdaptiveSpin, WantedCore


@pytest.fixture
def spin() -> AdaptiveSpin:
    return AdaptiveSpin()


def wait(spin: AdaptiveSpin, seconds: float, times: int) -> None:
    for _ in range(times):
        spin.waited(seconds)


def test_short_waits_lead_to_spinning_until_long_ones_come(spin: AdaptiveSpin) -> None:
    wait(spin, MAX_SPIN_SECONDS / 10, 1000)
    assert spin.seconds == MAX_SPIN_SECONDS
    wait(spin, 60.0, 1)  # one pause is no reason to stop
    assert spin.seconds == MAX_SPIN_SECONDS
    wait(spin, 0.1, 3)
    assert spin.seconds == 0.0
    for pause in (0.1, 3600.0):  # a long one is forgotten as fast as a short one
        wait(spin, pause, 100)
        assert spin.seconds == 0.0
        wait(spin, MAX_SPIN_SECONDS / 10, 20)
        assert spin.seconds == MAX_SPIN_SECONDS
    wait(spin, MAX_SPIN_SECONDS * 2, 100)
    assert spin.seconds == 0.0


SLICE_SECONDS = 0.003


def lose(core: WantedCore, now: float) -> float:
    """Loses the core for a time slice; returns when threads may poll again."""
    now += SLICE_SECONDS
    assert not core.polled(now - SLICE_SECONDS, now)
    assert now < core.spin_from
    until = now
    while until < core.spin_from:
        until += 0.001
    return until


def test_each_loss_of_the_core_soon_after_the_last_one_doubles_the_pause() -> None:
    core, now = WantedCore(), 50.0
    pauses = []
    for _ in range(10):
        again = lose(core, now)
        pauses.append(again - now - SLICE_SECONDS)
        now = again + 0.01
    assert pauses == pytest.approx([0.01 * 2**i for i in range(7)] + [1.0] * 3, abs=0.0015)


def test_a_loss_long_after_the_last_one_costs_a_short_pause() -> None:
    core, now = WantedCore(), 50.0
    for _ in range(10):
        now = lose(core, now) + 0.01
    now += 5.0
    assert lose(core, now) - now - SLICE_SECONDS == pytest.approx(0.01, abs=0.0015)

"""When a thread spins: if messages have been arriving soon and nobody wants its core; not long."""

from __future__ import annotations

import pytest

from zrpc.runtime.adaptive_spin import MAX_SPIN_SECONDS, AdaptiveSpin


def wait(spin: AdaptiveSpin, seconds: float, times: int) -> None:
    for _ in range(times):
        spin.waited(seconds)


def spins(spin: AdaptiveSpin, now: float = 1.0) -> bool:
    return now >= spin.begins


def test_short_waits_lead_to_spinning_until_long_ones_come() -> None:
    spin = AdaptiveSpin(cores=2)
    wait(spin, MAX_SPIN_SECONDS / 10, 1000)
    assert spins(spin)
    wait(spin, 60.0, 1)  # one pause is no reason to stop
    assert spins(spin)
    wait(spin, 0.1, 3)
    assert not spins(spin)
    for pause in (0.1, 3600.0):  # a long one is forgotten as fast as a short one
        wait(spin, pause, 100)
        assert not spins(spin)
        wait(spin, MAX_SPIN_SECONDS / 10, 20)
        assert spins(spin)
    wait(spin, MAX_SPIN_SECONDS * 2, 100)
    assert not spins(spin)


SLICE_SECONDS = 0.003


def lose(spin: AdaptiveSpin, now: float) -> float:
    """Loses the core for a time slice; returns when threads may poll again."""
    now += SLICE_SECONDS
    assert not spin.polled(now - SLICE_SECONDS, now)
    assert not spins(spin, now)
    return spin.begins


def test_each_loss_of_the_core_soon_after_the_last_one_doubles_the_pause() -> None:
    spin, now = AdaptiveSpin(cores=2), 50.0
    pauses = []
    for _ in range(10):
        again = lose(spin, now)
        pauses.append(again - now - SLICE_SECONDS)
        now = again + 0.01
    assert pauses == pytest.approx([0.01 * 2**i for i in range(7)] + [1.0] * 3)


def test_a_loss_long_after_the_last_one_costs_a_short_pause() -> None:
    spin, now = AdaptiveSpin(cores=2), 50.0
    for _ in range(10):
        now = lose(spin, now) + 0.01
    now += 5.0
    assert lose(spin, now) - now - SLICE_SECONDS == pytest.approx(0.01)


def look(spin: AdaptiveSpin, running: int, times: int) -> None:
    for _ in range(times):
        spin.looked(running, spin.next_look)
        wait(spin, MAX_SPIN_SECONDS / 10, 1)


def test_no_thread_spins_while_more_want_to_run_than_there_are_cores() -> None:
    spin = AdaptiveSpin(cores=2)
    look(spin, 2, 1000)
    assert spins(spin)
    look(spin, 3, 3)  # for a moment, as when a worker wakes another thread
    assert spins(spin)
    begun = spin.next_look
    look(spin, 3, 30)
    assert not spins(spin)
    assert spin.next_look - begun < 0.2
    look(spin, 2, 1)  # a core is free again
    assert spins(spin)

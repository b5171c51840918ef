"""Whether a thread polls: if waits have been short, and still shorter on contended cores."""

from __future__ import annotations

from zrpc.runtime.adaptive_spin import MAX_SPIN_SECONDS, AdaptiveSpin


def wait(spin: AdaptiveSpin, seconds: float, times: int) -> None:
    for _ in range(times):
        spin.waited(seconds)


def test_short_waits_lead_to_polls_until_long_ones_come() -> None:
    spin = AdaptiveSpin(cores=2)
    wait(spin, MAX_SPIN_SECONDS / 10, 1000)
    assert spin.polls
    wait(spin, 60.0, 1)  # one pause is no reason to stop
    assert spin.polls
    wait(spin, 0.1, 3)
    assert not spin.polls
    for pause in (0.1, 3600.0):  # a long one is forgotten as fast as a short one
        wait(spin, pause, 100)
        assert not spin.polls
        wait(spin, MAX_SPIN_SECONDS / 10, 20)
        assert spin.polls
    wait(spin, MAX_SPIN_SECONDS * 2, 100)
    assert not spin.polls


def look(spin: AdaptiveSpin, running: int, times: int, waits: float) -> None:
    for _ in range(times):
        spin.looked(running, spin.next_look)
        wait(spin, waits, 10)


def test_on_contended_cores_only_the_shortest_waits_lead_to_polls() -> None:
    spin, short, shortest = AdaptiveSpin(cores=2), MAX_SPIN_SECONDS / 2, MAX_SPIN_SECONDS / 10
    look(spin, 2, 1000, short)
    assert spin.polls
    look(spin, 3, 3, short)  # for a moment, as when a worker wakes another thread
    assert spin.polls
    begun = spin.next_look
    look(spin, 3, 30, short)
    assert not spin.polls
    assert spin.next_look - begun < 0.2
    look(spin, 3, 5, shortest)
    assert spin.polls
    look(spin, 3, 5, short)
    assert not spin.polls
    look(spin, 2, 1, short)  # a core is free again
    assert spin.polls

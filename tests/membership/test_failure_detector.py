"""When a worker is declared dead: the rules, and their properties for any history."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zrpc.membership.failure_detector import FailureDetector, Loss, Reason

LIMIT = 10.0
TICK = 0.1


@pytest.fixture
def detector() -> FailureDetector:
    return FailureDetector(LIMIT)


def ticks(detector: FailureDetector, start: float, end: float) -> list[Loss]:
    """Lets time pass; returns the first losses."""
    now = start
    while now < end:
        now += TICK
        if losses := detector.tick(now):
            return losses
    return []


def test_a_peer_that_never_answers_is_declared_dead_within_the_limit(
    detector: FailureDetector,
) -> None:
    detector.monitor(1, 5.0)
    (loss,) = ticks(detector, 5.0, 50.0)
    assert (loss.member, loss.reason, loss.heard) == (1, Reason.SILENT, None)
    assert loss.unreached
    assert 0.8 * LIMIT < loss.at - 5.0 <= LIMIT
    assert ticks(detector, loss.at, 100.0) == []  # once


@pytest.mark.parametrize("limit", [0.1, 0.3, 0.6])
def test_a_peer_is_declared_dead_also_if_a_tick_takes_much_of_a_short_limit(limit: float) -> None:
    detector = FailureDetector(limit)
    detector.monitor(1, 0.0)
    losses = [loss for tick in range(10) for loss in detector.tick(0.2 * tick)]
    assert [loss.reason for loss in losses] == [Reason.SILENT]
    assert losses[0].at <= limit + 0.2


def test_the_silence_of_a_peer_begins_with_its_last_answer(detector: FailureDetector) -> None:
    detector.monitor(1, 0.0)
    assert detector.silence(1, 1.0) is detector.silence(2, 1.0) is None
    detector.connected(1, 2.0)
    assert detector.silence(1, 90.0) == 0.0
    broken = 100.0 + detector.interval + detector.timeout
    detector.disconnected(1, broken)
    assert detector.silence(1, broken) == pytest.approx(broken - 100.0)
    detector.heard(1, broken)
    assert detector.silence(1, broken + 3.0) == pytest.approx(3.0)


def test_a_peer_that_is_connected_to_after_many_others_is_kept(detector: FailureDetector) -> None:
    """On a busy machine, connections to many peers that are begun at once take long."""
    peers = range(1, 21)
    for peer in peers:
        detector.monitor(peer, 0.1 * peer)
    for peer in peers:
        assert ticks(detector, 5.0 * (peer - 1) + 2.0, 5.0 * peer + 2.0) == []
        detector.connected(peer, 5.0 * peer + 2.0)
    assert ticks(detector, 102.0, 200.0) == []


def test_a_peer_that_never_answers_is_declared_dead_after_the_last_of_the_others(
    detector: FailureDetector,
) -> None:
    for peer in (1, 2, 3):
        detector.monitor(peer, 0.0)
    detector.monitor(4, LIMIT)  # too late to wait for
    detector.connected(1, 3.0)
    assert ticks(detector, 0.0, 7.0) == []
    detector.connected(2, 7.0)
    assert ticks(detector, 7.0, 12.0) == []
    detector.connected(4, 12.0)
    (loss,) = ticks(detector, 12.0, 50.0)
    assert loss.member == 3
    assert loss.unreached
    assert 7.0 + 0.8 * LIMIT < loss.at <= 7.0 + LIMIT


def test_without_a_limit_no_peer_is_silent() -> None:
    detector = FailureDetector(0)
    detector.monitor(1, 0.0)
    assert ticks(detector, 0.0, 1000.0) == []
    detector.checked(1, False, 0.0)
    detector.checked(1, False, 0.0)
    assert [loss.reason for loss in detector.tick(1000.0)] == [Reason.ENDED]


@pytest.mark.parametrize("gap", [5.0, 60.0, 3600.0])
def test_our_own_gap_does_not_count_as_silence(detector: FailureDetector, gap: float) -> None:
    detector.monitor(1, 0.0)
    ticks(detector, 0.0, 8.0)  # not connected for most of the limit
    assert detector.tick(8.0 + gap) == []
    assert ticks(detector, 8.0 + gap, 8.0 + gap + 0.8) == []
    detector.connected(1, 8.8 + gap)
    assert ticks(detector, 8.8 + gap, 30.0 + gap) == []


def test_an_exit_is_believed_at_the_second_check(detector: FailureDetector) -> None:
    """A peer that was never heard was last seen alive, or when its exit broke the connection."""
    detector.checked(1, False, 0.0)
    assert detector.tick(0.1) == []
    detector.checked(2, True, 7.0)
    detector.monitor(3, 0.0)
    detector.connected(3, 0.0)
    detector.disconnected(3, 7.05)
    for peer in (1, 2, 2, 3, 3):
        detector.checked(peer, False, 7.1)
    found = [Loss(peer, Reason.ENDED, 7.2, at) for peer, at in ((1, None), (2, 7.0), (3, 7.05))]
    assert detector.tick(7.2) == found
    detector.checked(1, False, 7.2)
    assert detector.tick(7.3) == []


def test_suspected_peers_are_checked_each_time_and_others_in_rotation(
    detector: FailureDetector,
) -> None:
    many = list(range(50))
    for member in (20, 40):
        detector.checked(member, False, 0.0)
    seen = set()
    for _ in range(6):
        now = detector.to_check(many)
        assert now[:2] == [20, 40]
        assert len(now) == 10
        seen |= set(now)
    assert seen == set(many)
    for _ in range(3):
        assert sorted(detector.to_check([0, 2, 3])) == [0, 2, 3]  # a few are all checked
    detector.declare_lost(2, Reason.LEFT, 0.0)
    assert sorted(detector.to_check([0, 2, 3])) == [0, 3]
    assert detector.to_check([]) == []


# -- for any history -------------------------------------------------------------------------


EVENTS = "watch", "heard", "up", "down", "dead", "alive", "leave"


@pytest.mark.system
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(EVENTS), st.floats(0.0, 3.0)), max_size=60
    )
)
@example(events=[(2, "up", 3.0), (2, "watch", 3.0), (2, "down", 3.0)])
@example(events=[(1, "watch", 1.0), (0, "watch", 3.0), (2, "heard", 3.0), (0, "up", 3.0)])
@settings(max_examples=60)
def test_each_peer_is_lost_at_most_once_and_never_without_a_sign(
    events: list[tuple[int, str, float]],
) -> None:
    detector = FailureDetector(LIMIT)
    lost: dict[int, Reason] = {}
    up: set[int] = set()
    dead_in_a_row, found_dead = [0, 0, 0], set()
    last_sign = [0.0, 0.0, 0.0]
    now = 0.0
    for member, event, pause in events:
        if event == "watch" and not detector.monitors(member):
            detector.monitor(member, now)
            last_sign[member] = now
        elif event == "heard":
            detector.heard(member, now)
            last_sign[member] = now
        elif event == "up" and member not in lost:
            detector.connected(member, now)
            up.add(member)
            last_sign[member] = now
            dead_in_a_row[member] = 0
        elif event == "down" and member in up:
            detector.disconnected(member, now)
            up.discard(member)
            last_sign[member] = max(last_sign[member], now - detector.interval - detector.timeout)
        elif event in ("dead", "alive"):
            detector.checked(member, event == "alive", now)
            dead_in_a_row[member] = dead_in_a_row[member] + 1 if event == "dead" else 0
            if dead_in_a_row[member] == 2:
                found_dead.add(member)
        elif event == "leave" and detector.declare_lost(member, Reason.LEFT, now) is not None:
            assert member not in lost
            lost[member] = Reason.LEFT
        end = now + pause
        while now < end:
            now += TICK
            for loss in detector.tick(now):
                assert loss.member not in lost
                lost[loss.member] = loss.reason
                assert loss.heard is None or loss.heard <= loss.at == now
                if loss.reason is Reason.ENDED:
                    assert loss.member in found_dead
                else:
                    assert loss.reason is Reason.SILENT
                    assert loss.member not in up
                    assert now - last_sign[loss.member] >= 0.8 * LIMIT


@pytest.mark.system
@settings(max_examples=50)
@given(stops=st.floats(0.0, 60.0), phase=st.floats(0.0, 1.0), limit=st.floats(0.5, 60.0))
def test_a_stop_at_any_moment_is_noticed_within_the_limit(
    stops: float, phase: float, limit: float
) -> None:
    """A peer that is asked every interval stops at any time between two answers."""
    detector = FailureDetector(limit)
    detector.monitor(1, 0.0)
    detector.connected(1, 0.0)
    stopped = stops * limit
    last_answer = max(0.0, stopped - phase * detector.interval)
    broken = last_answer + detector.interval + detector.timeout
    tick = min(TICK, limit / 10)
    now, told = 0.0, False
    while now <= stopped + 2 * limit:
        now += tick
        if not told and now >= broken:
            detector.disconnected(1, now)
            told = True
        if losses := detector.tick(now):
            assert not losses[0].unreached
            assert 0 < now - stopped <= limit + 2 * tick
            return
    raise AssertionError("it was never noticed")

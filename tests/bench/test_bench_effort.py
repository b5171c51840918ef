"""How samples are taken and merged."""

from __future__ import annotations

import time

import pytest

from zrpc.bench.effort import Effort, Sample


def test_a_workload_is_called_as_often_as_asked_and_once_to_warm_up() -> None:
    calls: list[int] = []
    sample = Effort(seconds=0, least=5).time(lambda: calls.append(1))
    assert sample.repeats == 5
    assert len(calls) == 6
    assert 0 < sample.value <= sample.worst


def test_a_workload_is_repeated_as_long_as_asked() -> None:
    before = time.perf_counter()
    sample = Effort(seconds=0.05, least=1).time(lambda: None)
    assert time.perf_counter() - before >= 0.05
    assert sample.repeats > 100


def test_the_median_is_taken_and_the_worst_kept() -> None:
    naps = iter([0.0, 0.0, 0.05, 0.0])
    sample = Effort(seconds=0, least=3).time(lambda: time.sleep(next(naps)))
    assert sample.value < 0.05 <= sample.worst


def test_a_rate_counts_what_a_batch_does() -> None:
    sample = Effort(seconds=0, least=1).rate(lambda: time.sleep(0.01), 10)
    assert 100 < sample.value <= 1000
    assert sample.worst == sample.value


def test_batches_shrink_with_the_scale_but_never_to_nothing() -> None:
    assert Effort().scaled(1000) == 1000
    assert Effort(scale=0.02).scaled(1000) == 20
    assert Effort(scale=0.02).scaled(8) == 1


def test_turns_share_the_effort() -> None:
    effort = Effort(seconds=0.3, least=5, scale=0.5).divided(6)
    assert effort == Effort(seconds=pytest.approx(0.05), least=1, scale=0.5)
    assert effort.divided(1) == effort


def test_each_turn_counts_as_much_as_the_others() -> None:
    turns = [Sample(1.0, 2.0, 1000), Sample(3.0, 9.0, 10), Sample(4.0, 5.0, 10)]
    assert Sample.merged(turns, more_is_better=False) == Sample(3.0, 9.0, 1020)
    assert Sample.merged(turns, more_is_better=True) == Sample(3.0, 2.0, 1020)

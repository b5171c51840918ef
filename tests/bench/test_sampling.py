"""Tests of `Sampling` and `Sample`."""

from __future__ import annotations

import time

import pytest

from zrpc.bench.sampling import Sample, Sampling


def test_a_workload_is_repeated_at_least_min_repeats_times_after_one_warm_up() -> None:
    calls: list[int] = []
    sample = Sampling(seconds=0, min_repeats=5).time(lambda: calls.append(1))
    assert sample.repeats == 5
    assert len(calls) == 6
    assert 0 < sample.value <= sample.worst


def test_a_workload_is_repeated_for_the_given_seconds() -> None:
    before = time.perf_counter()
    sample = Sampling(seconds=0.05, min_repeats=1).time(lambda: None)
    assert time.perf_counter() - before >= 0.05
    assert sample.repeats > 100


def test_a_sample_has_the_median_and_the_worst_repeat() -> None:
    naps = iter([0.0, 0.0, 0.05, 0.0])
    sample = Sampling(seconds=0, min_repeats=3).time(lambda: time.sleep(next(naps)))
    assert sample.value < 0.05 <= sample.worst


def test_a_rate_counts_the_operations_of_a_batch() -> None:
    sample = Sampling(seconds=0, min_repeats=1).rate(lambda: time.sleep(0.01), 10)
    assert 100 < sample.value <= 1000
    assert sample.worst == sample.value


def test_batches_shrink_with_the_scale_but_never_below_one() -> None:
    assert Sampling().scaled(1000) == 1000
    assert Sampling(scale=0.02).scaled(1000) == 20
    assert Sampling(scale=0.02).scaled(8) == 1


def test_turns_divide_the_sampling() -> None:
    sampling = Sampling(seconds=0.3, min_repeats=5, scale=0.5).divided(6)
    assert sampling == Sampling(seconds=pytest.approx(0.05), min_repeats=1, scale=0.5)
    assert sampling.divided(1) == sampling


def test_merging_gives_all_turns_the_same_weight() -> None:
    turns = [Sample(1.0, 2.0, 1000), Sample(3.0, 9.0, 10), Sample(4.0, 5.0, 10)]
    assert Sample.merged(turns, more_is_better=False) == Sample(3.0, 9.0, 1020)
    assert Sample.merged(turns, more_is_better=True) == Sample(3.0, 2.0, 1020)

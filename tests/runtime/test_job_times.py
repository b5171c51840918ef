"""Which jobs count as quick or short, by how long the last ones took."""

from __future__ import annotations

from zrpc.runtime.job_times import QUICK_JOB_SECONDS, JobTimes


def after(*seconds: float) -> tuple[bool, bool]:
    """Whether jobs are quick, and short, after jobs that took this long."""
    times = JobTimes()
    for each in seconds:
        times.took(each)
    return times.quick, times.short


def test_many_jobs_of_the_same_length() -> None:
    for seconds, expected in (
        (QUICK_JOB_SECONDS / 2, (True, True)),
        (QUICK_JOB_SECONDS * 2, (False, True)),
        (0.001, (False, True)),
        (0.005, (False, False)),
        (3600.0, (False, False)),
    ):
        assert after(*[seconds] * 100) == expected


def test_after_a_job_that_kept_its_thread_for_too_long_others_count_as_long() -> None:
    times = JobTimes()
    times.overran()
    assert (times.quick, times.short) == (False, False)
    for _ in range(20):
        times.took(0.0)
    assert not times.short
    for _ in range(5):
        times.took(0.0)
    assert times.short

"""Which jobs count as quick or short, by how long the last ones took; see the example, too."""

from __future__ import annotations

from zrpc.runtime.job_times import JobTimes


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

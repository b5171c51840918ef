"""The end of a handler pool: the jobs that run, those that are queued, and the timeout."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest

from tests.runtime.pool_jobs import SOON, Jobs, MakePool, admitted, until
from zrpc.runtime.thread_pool import HandlerPool, pass_gate


def test_close_waits_for_jobs_and_drops_those_queued(make_pool: MakePool, jobs: Jobs) -> None:
    pool, ran = make_pool(1), []
    pool.submit(jobs)
    jobs.await_begun(1)
    pool.submit(lambda: ran.append(1))
    jobs.go.set()
    pool.close(SOON)
    jobs.await_ended(1)
    assert pool.active == 0
    assert not any(thread.is_alive() for thread in jobs.threads)
    pool.submit(lambda: ran.append(2))
    assert pool.active == 0
    assert 2 not in ran


def test_close_can_finish_queued_jobs(make_pool: MakePool, jobs: Jobs) -> None:
    pool, done = make_pool(1), []
    pool.submit(jobs)
    jobs.await_begun(1)
    for number in range(10):
        pool.submit(lambda number=number: done.append(number))
    jobs.go.set()
    assert pool.close(SOON, finish=True)
    assert done == list(range(10))
    pool.submit(lambda: done.append("late"))
    assert pool.active == 0
    assert "late" not in done


def test_close_finishes_only_what_its_timeout_allows(make_pool: MakePool, jobs: Jobs) -> None:
    pool, done = make_pool(1), []
    pool.submit(jobs)
    jobs.await_begun(1)
    pool.submit(lambda: done.append("late"))
    assert not pool.close(0.01, finish=True)
    jobs.go.set()
    assert pool.close(SOON)
    assert done == []


class Held:
    """What a job holds, with a finalizer that submits another job."""

    def __init__(self, pool: HandlerPool, freed: threading.Event) -> None:
        self.pool, self.freed = pool, freed

    def __del__(self) -> None:
        self.pool.submit(int)
        self.freed.set()


@pytest.mark.parametrize(
    "drop",
    [
        lambda pool: pool.discard(lambda job: True),
        lambda pool: pool.close(0),
        lambda pool: pool.close(0, finish=True),
    ],
    ids=["discard", "close", "close that finishes"],
)
def test_the_finalizer_of_what_a_dropped_job_holds_may_submit_another(
    make_pool: MakePool, jobs: Jobs, drop: Callable[[HandlerPool], object]
) -> None:
    pool, freed = make_pool(1), threading.Event()
    pool.submit(jobs)
    jobs.await_begun(1)
    pool.submit(partial(id, Held(pool, freed)))
    threading.Thread(target=drop, args=(pool,), daemon=True).start()
    assert freed.wait(SOON)
    jobs.go.set()


def test_close_reports_a_job_that_is_stuck(make_pool: MakePool, jobs: Jobs) -> None:
    pool = make_pool(2)
    pool.submit(jobs)
    jobs.await_begun(1)
    assert pool.close(0.01) is False
    jobs.go.set()
    jobs.await_ended(1)
    assert pool.close(SOON) is True


def test_close_from_a_job_of_the_pool(make_pool: MakePool) -> None:
    pool, found = make_pool(2), []
    pool.submit(lambda: found.append(pool.close(SOON)))
    until(lambda: found)
    assert found == [True]


@pytest.mark.parametrize("as_guest", [True, False])
def test_a_job_can_close_its_pool_and_finish_queued_jobs(
    make_pool: MakePool, as_guest: bool
) -> None:
    pool, found, done = make_pool(1), [], threading.Event()

    def end() -> None:
        for each in range(3):
            pool.submit(partial(found.append, each))
        pool.close(SOON, finish=True)
        done.set()

    if as_guest:
        pool.run_as_guest(admitted(pool), [end])
    else:
        pool.submit(end)
    assert done.wait(SOON)
    assert found == [0, 1, 2]


@pytest.mark.parametrize("as_guest", [True, False])
def test_an_idle_thread_finishes_queued_jobs_if_a_job_closes_its_pool(
    make_pool: MakePool, as_guest: bool
) -> None:
    pool, found, done = make_pool(1), [], threading.Event()

    def end() -> None:
        # Another thread runs meanwhile, and is idle afterwards.
        gate = threading.Lock()
        gate.acquire()
        pool.submit(gate.release)
        assert pass_gate(gate, SOON)
        until(lambda: pool._idle)
        for each in range(3):
            pool.submit(partial(found.append, each))
        pool.close(SOON, finish=True)
        done.set()

    if as_guest:
        pool.run_as_guest(admitted(pool), [end])
    else:
        pool.submit(end)
    assert done.wait(SOON)
    assert found == [0, 1, 2]

"""The end of a handler pool: the jobs that run, those that are queued, and the timeout."""

from __future__ import annotations

import threading
from functools import partial

from tests.runtime.pool_jobs import Jobs, MakePool, admitted, closed_gate
from tests.support.waiting import SOON, until
from zrpc.runtime.thread_pool import HandlerPool, pass_gate


def test_close_waits_for_jobs_and_drops_those_queued(make_pool: MakePool, jobs: Jobs) -> None:
    pool, ran = make_pool(1), []
    jobs.fill(pool, 1)
    pool.submit(lambda: ran.append("queued"))
    assert pool.close(0.01) is False
    jobs.go.set()
    assert pool.close(SOON) is True
    jobs.await_ended(1)
    pool.submit(lambda: ran.append("late"))
    assert pool.active == 0
    assert ran == []


def test_close_can_finish_queued_jobs_as_far_as_its_timeout_allows(make_pool: MakePool) -> None:
    for seconds in (SOON, 0.01):
        pool, jobs, done = make_pool(1), Jobs(), list[int]()
        jobs.fill(pool, 1)
        for number in range(10):
            pool.submit(partial(done.append, number))
        if seconds == SOON:
            jobs.go.set()
        assert pool.close(seconds, finish=True) is (seconds == SOON)
        jobs.go.set()
        assert pool.close(SOON)
        pool.submit(partial(done.append, 10))
        assert pool.active == 0
        assert done == [*range(10)] * (seconds == SOON)


class Held:
    """What a job holds, with a finalizer that submits another job."""

    def __init__(self, pool: HandlerPool, freed: threading.Event) -> None:
        self.pool, self.freed = pool, freed

    def __del__(self) -> None:
        self.pool.submit(int)
        self.freed.set()


def test_the_finalizer_of_what_a_dropped_job_holds_may_submit_another(
    make_pool: MakePool, jobs: Jobs
) -> None:
    for drop in (
        lambda pool: pool.discard(lambda job: True),
        lambda pool: pool.close(0),
        lambda pool: pool.close(0, finish=True),
    ):
        pool, freed = make_pool(1), threading.Event()
        jobs.fill(pool, 1)
        pool.submit(partial(id, Held(pool, freed)))
        threading.Thread(target=drop, args=(pool,), daemon=True).start()
        assert freed.wait(SOON)


def test_a_job_can_close_its_pool_and_finish_queued_jobs(make_pool: MakePool) -> None:
    """Whether a thread of the pool runs it or a guest, and whether others are idle."""
    for as_guest in (True, False):
        for others_idle in (True, False):
            pool, found, done = make_pool(1), [], threading.Event()

            def end(pool=pool, found=found, done=done, others_idle=others_idle) -> None:  # type: ignore[no-untyped-def]
                if others_idle:
                    gate = closed_gate()
                    pool.submit(gate.release)
                    assert pass_gate(gate, SOON)
                    until(lambda: pool.load(0).idle)
                for each in range(3):
                    pool.submit(partial(found.append, each))
                assert pool.close(SOON, finish=True)
                done.set()

            if as_guest:
                pool.run_as_guest(admitted(pool), [end])
            else:
                pool.submit(end)
            assert done.wait(SOON)
            assert found == [0, 1, 2]

"""The handler pool: how many jobs run, and when threads start and stop."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest

from tests.runtime.pool_jobs import Jobs, MakePool, admitted, closed_gate, done
from tests.support.recursion import call_with_frames_left
from tests.support.threads import no_more_threads, start_all
from tests.support.waiting import SOON, until
from zrpc.runtime import thread_pool
from zrpc.runtime.thread_pool import HandlerPool, end_with, in_pool, pass_gate


def test_jobs_run_in_order_in_threads_of_the_pool_which_are_reused(make_pool: MakePool) -> None:
    pool, found, order = make_pool(1), [], []
    for number in range(20):
        pool.submit(lambda: found.append((in_pool(pool), threading.current_thread())))
        pool.submit(lambda number=number: order.append(number))
    done(pool)
    assert order == list(range(20))
    [(inside, thread)] = set(found)
    assert inside
    assert thread.name.startswith("test-pool-")
    assert thread.daemon
    assert not in_pool(pool)
    assert not in_pool(make_pool(1))


def test_no_more_jobs_run_than_the_size(make_pool: MakePool, jobs: Jobs) -> None:
    pool = make_pool(3)
    jobs.fill(pool, 3, queued=2)
    assert pool.active == 5
    assert not jobs.begun.acquire(blocking=False)
    assert pool.load(0).threads == 3
    jobs.go.set()
    jobs.await_ended(5)
    assert len(jobs.threads) == 3


def test_jobs_that_come_at_once_run_at_once_although_those_before_were_short(
    make_pool: MakePool,
) -> None:
    pool, barrier, met = make_pool(3), threading.Barrier(3), threading.Semaphore(0)

    def meet() -> None:
        barrier.wait(SOON)
        met.release()

    for _ in range(2):  # at last there are three idle threads
        for _ in range(3):
            pool.submit(meet)
        for _ in range(3):
            assert met.acquire(timeout=SOON)
        for _ in range(50):
            pool.submit(int)
        done(pool)
        assert pool.times.short
        until(lambda: pool.load(0).idle == pool.load(0).threads == 3)


def test_a_waiting_thread_is_replaced_and_counts_again_afterwards(make_pool: MakePool) -> None:
    pool, gate, back, running, most = make_pool(1), closed_gate(), threading.Event(), [], []

    def count() -> None:
        running.append(1)
        most.append(len(running))
        time.sleep(0.0001)  # long enough for another thread to run beside it
        running.pop()

    def wait() -> None:
        assert pass_gate(gate, SOON)
        back.set()

    pool.submit(wait)
    done(pool)  # another thread has taken its place
    gate.release()
    assert back.wait(SOON)
    for _ in range(20):
        pool.submit(count)
    done(pool)
    assert max(most) == 1


def test_a_job_that_another_one_ends_with_is_the_next_in_its_thread(make_pool: MakePool) -> None:
    pool, threads, over = make_pool(4), [], threading.Event()

    def note(then: Callable[[], object]) -> None:
        threads.append(threading.current_thread())
        then()

    def first() -> None:
        end_with(lambda: (pool.submit(partial(note, over.set)), note(lambda: None)))

    pool.submit(first)
    assert over.wait(SOON)
    assert len(threads) == 2
    assert len(set(threads)) == 1
    assert pool.load(0).threads == 1


def test_other_jobs_that_one_ends_with_run_beside_it_and_outside_of_a_pool_as_any(
    make_pool: MakePool,
) -> None:
    pool, both, over = make_pool(4), threading.Barrier(3), threading.Event()
    pool.submit(partial(end_with, lambda: [pool.submit(partial(both.wait, SOON)) for _ in "ab"]))
    both.wait(SOON)
    end_with(partial(pool.submit, over.set))
    assert over.wait(SOON)


def test_the_time_of_a_job_is_without_its_waits(make_pool: MakePool) -> None:
    pool, gate, counted, passed, seconds = make_pool(1), closed_gate(), [], [], 0.05
    pool.times = SimpleNamespace(took=counted.append)
    began = time.perf_counter()
    pool.submit(lambda: passed.append(pass_gate(gate, seconds)))
    until(lambda: counted)
    assert counted[0] <= time.perf_counter() - began - seconds
    assert passed == [False]


def test_relieve_replaces_threads_that_wait_unseen(make_pool: MakePool, jobs: Jobs) -> None:
    pool, freed = make_pool(2), threading.Event()
    jobs.fill(pool, 2)
    for _ in range(5):  # nothing is queued
        pool.relieve()
    assert pool.load(0).threads == 2
    pool.submit(freed.set)
    until(lambda: pool.relieve() or freed.is_set())


@pytest.mark.system
@pytest.mark.skipif("sys.platform != 'linux'", reason="needs the processor time of a thread")
def test_relieve_does_not_replace_working_threads(make_pool: MakePool, jobs: Jobs) -> None:
    pool, working = make_pool(1), threading.Event()

    def work() -> None:
        while not jobs.go.is_set():
            working.set()

    pool.submit(work)
    assert working.wait(SOON)
    pool.submit(lambda: None)
    for _ in range(3):
        pool.relieve()
        for _ in range(20):  # lets the job work, by waiting for its progress
            working.clear()
            assert working.wait(SOON)
    assert pool.load(0).threads == 1


def test_a_job_that_fails_is_logged_and_its_thread_goes_on(
    make_pool: MakePool, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(error: BaseException) -> None:
        raise error

    pool = make_pool(1)
    pool.submit(lambda: fail(LookupError("of the job")))
    pool.submit(lambda: fail(SystemExit()))
    done(pool)
    assert pool.load(0).threads == 1
    assert "LookupError: of the job" in caplog.text
    assert "A job of test-pool failed" in caplog.text


def test_a_job_waits_if_no_thread_can_be_started(
    make_pool: MakePool,
    jobs: Jobs,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It runs once another job has ended, or once a thread can be started."""
    pool, ran, others = make_pool(2), threading.Event(), make_pool(2)
    jobs.fill(pool, 1)
    with no_more_threads():
        pool.submit(ran.set)
        others.submit(others.relieve)
        for each in (pool, others, pool, others):
            each.relieve()
        for text in ("a call waits", "raise the limit with `ulimit -u`"):
            assert caplog.text.count(text) == 2  # once for each pool
        assert "Traceback" not in caplog.text
        assert others.load(0).full_for
        assert not ran.is_set()
        jobs.go.set()
        assert ran.wait(SOON)
    others.relieve()
    until(lambda: not others.active)


def test_a_pool_knows_for_how_long_jobs_have_waited(make_pool: MakePool, jobs: Jobs) -> None:
    pool, others = make_pool(2), Jobs()
    jobs.fill(pool, 1)
    others.fill(pool, 1)
    others.fill(pool, 0, queued=2)
    time.sleep(0.05)
    load = pool.load(0)
    assert load.full_for > 0.04
    jobs.go.set()
    assert others.begun.acquire(timeout=SOON)  # another is still queued
    load = pool.load(0)
    assert load.full_for > 0.04
    others.go.set()
    others.await_ended(3)
    assert not any(pool.load(0)[5:8])


class Submitting(logging.Handler):
    """A program's log handler that makes calls, whose answers need a pool."""

    def __init__(self, pool: HandlerPool) -> None:
        super().__init__()
        self.ran = threading.Event()
        self._pool = pool

    def emit(self, record: logging.LogRecord) -> None:
        self._pool.submit(self.ran.set)


def test_a_log_handler_may_make_calls_when_the_system_refuses_a_thread(
    make_pool: MakePool, jobs: Jobs
) -> None:
    pool = make_pool(2)
    jobs.fill(pool, 1)
    handler, refused = Submitting(pool), threading.Event()
    thread_pool.logger.addHandler(handler)
    try:
        finish = start_all([lambda: refused.wait(SOON) and pool.relieve()], SOON)
        with no_more_threads():
            pool.submit(lambda: None)
            refused.set()
            finish()
            jobs.go.set()
            assert handler.ran.wait(SOON)
    finally:
        thread_pool.logger.removeHandler(handler)


def test_a_job_that_is_submitted_near_the_recursion_limit_takes_no_place(
    make_pool: MakePool,
) -> None:
    pool = make_pool(1)
    for left in range(2, 40, 2):
        ran: list[str] = []
        first, second = partial(ran.append, "first"), partial(ran.append, "second")
        submitted = call_with_frames_left(left, partial(pool.submit, first))
        pool.submit(second)
        pool.relieve()  # as an agent does ten times a second
        done(pool)
        assert ran[-1] == "second"
        assert len(ran) == 2 or not submitted


# -- threads from outside that run its jobs, and threads of its own that receive --------------


def test_a_guest_runs_jobs_queued_behind_its_own_but_not_after_a_long_one(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for quick_seconds, expected in ((SOON, True), (0.0, False)):
        monkeypatch.setattr(thread_pool, "QUICK_JOB_SECONDS", quick_seconds)
        pool, ran_here, done = make_pool(1), [], threading.Event()
        me = admitted(pool)

        def note(ran_here: list[bool] = ran_here, me: int = me) -> None:
            ran_here.append(threading.get_ident() == me)

        for _ in range(3):
            pool.submit(note)
        pool.submit(done.set)
        pool.run_as_guest(me, [partial(time.sleep, 0.0001)])
        assert done.wait(SOON)
        assert ran_here == [expected] * 3


def test_a_guests_job_is_freed_before_the_next_one_runs(make_pool: MakePool) -> None:
    pool, found, gone, argument = make_pool(1), [], threading.Event(), threading.Event()
    me = admitted(pool)
    weakref.finalize(argument, gone.set)
    jobs = [partial(argument.is_set)]
    del argument
    pool.submit(lambda: found.append(gone.is_set()))
    pool.run_as_guest(me, jobs)
    assert found == [True]


def test_a_waiting_thread_may_receive_for_itself(make_pool: MakePool) -> None:
    def job() -> None:
        def note(gate: threading.Lock, timeout: float) -> None:
            found.append(("received", timeout))

        found.append(pass_gate(closed_gate(), SOON, lambda gate, timeout: gate.release()))
        found.append(pass_gate(closed_gate(), 0, note))
        found.append(pass_gate(threading.Lock(), SOON, note))  # it is open
        ended.set()

    for run in (make_pool(1).submit, lambda job: job()):
        ended, found = threading.Event(), []
        run(job)
        assert ended.wait(SOON)
        assert found == [True, ("received", 0), False, True]

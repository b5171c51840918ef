"""The handler pool: how many jobs run, and when threads start and stop."""

from __future__ import annotations

import contextvars
import threading
import time
from types import SimpleNamespace

import pytest

from tests.runtime.pool_jobs import SOON, Jobs, MakePool, done, until
from zrpc.runtime.thread_pool import MAX_THREADS, in_pool, pass_gate


def test_jobs_run_in_threads_of_the_pool(make_pool: MakePool) -> None:
    pool, found = make_pool(2), []
    assert not in_pool(pool)
    pool.submit(lambda: found.append((in_pool(pool), threading.current_thread())))
    done(pool)
    [(inside, thread)] = found
    assert inside
    assert thread is not threading.current_thread()
    assert thread.name.startswith("test-pool-")
    assert thread.daemon
    assert not in_pool(make_pool(1))


def test_threads_start_when_needed_and_are_reused(make_pool: MakePool) -> None:
    pool, threads = make_pool(16), set()
    assert pool.active == 0
    for _ in range(50):
        pool.submit(lambda: threads.add(threading.current_thread()))
        until(lambda: pool.active == 0)
    assert len(threads) == 1


def test_no_more_jobs_run_than_the_size(make_pool: MakePool, jobs: Jobs) -> None:
    pool = make_pool(3)
    for _ in range(5):
        pool.submit(jobs)
    jobs.await_begun(3)
    assert pool.active == 5
    assert not jobs.begun.acquire(blocking=False)
    assert len(pool._threads) == 3
    jobs.go.set()
    jobs.await_ended(5)
    assert len(jobs.threads) == 3


def test_jobs_begin_in_order(make_pool: MakePool) -> None:
    pool, order = make_pool(1), []
    for number in range(20):
        pool.submit(lambda number=number: order.append(number))
    done(pool)
    assert order == list(range(20))


def test_a_waiting_thread_is_replaced(make_pool: MakePool) -> None:
    # Recursion: each job waits for the next. With a fixed number of threads it would deadlock.
    pool, depth, bottom = make_pool(2), 100, threading.Event()

    def descend(level: int) -> None:
        if level == 0:
            bottom.set()
            return
        gate = threading.Lock()
        gate.acquire()

        def next_level() -> None:
            descend(level - 1)
            gate.release()

        pool.submit(next_level)
        assert pass_gate(gate, SOON)

    pool.submit(lambda: descend(depth))
    assert bottom.wait(SOON)
    until(lambda: pool.active == 0)
    # Surplus threads are not kept.
    until(lambda: len(pool._threads) <= 2 * pool._size)


def test_a_thread_that_comes_back_from_a_wait_counts_again(make_pool: MakePool) -> None:
    pool, gate = make_pool(1), threading.Lock()
    gate.acquire()
    running, most, back = [], [], threading.Event()
    lock = threading.Lock()

    def count() -> None:
        with lock:
            running.append(1)
            most.append(len(running))
        until(lambda: True)
        with lock:
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


def test_a_gate_is_passed_once_it_is_open_and_stays_open() -> None:
    gate = threading.Lock()
    gate.acquire()
    assert not pass_gate(gate, 0.01)
    threading.Thread(target=gate.release).start()
    assert pass_gate(gate, SOON)
    assert pass_gate(gate)


def test_a_wait_at_a_gate_in_a_pool_can_time_out(make_pool: MakePool) -> None:
    pool, gate, found = make_pool(1), threading.Lock(), []
    gate.acquire()
    pool.submit(lambda: found.append(pass_gate(gate, 0.01)))
    until(lambda: found)
    assert found == [False]
    gate.release()
    pool.submit(lambda: found.append(pass_gate(gate)))
    done(pool)
    assert found == [False, True]


def test_the_time_of_a_job_is_without_its_waits(make_pool: MakePool) -> None:
    pool, gate, counted, seconds = make_pool(1), threading.Lock(), [], 0.05
    gate.acquire()
    pool.times = SimpleNamespace(took=counted.append)
    began = time.perf_counter()
    pool.submit(lambda: pass_gate(gate, seconds))
    until(lambda: counted)
    assert counted[0] <= time.perf_counter() - began - seconds


def test_relieve_replaces_threads_that_wait_unseen(make_pool: MakePool, jobs: Jobs) -> None:
    pool = make_pool(2)
    pool.submit(jobs)
    pool.submit(jobs)
    jobs.await_begun(2)
    freed = threading.Event()
    pool.submit(freed.set)
    until(lambda: pool.relieve() or freed.is_set())


def test_relieve_starts_nothing_if_nothing_is_queued(make_pool: MakePool, jobs: Jobs) -> None:
    pool = make_pool(2)
    pool.submit(jobs)
    pool.submit(jobs)
    jobs.await_begun(2)
    for _ in range(5):
        pool.relieve()
    assert len(pool._threads) == 2


@pytest.mark.system
@pytest.mark.skipif("sys.platform != 'linux'", reason="needs the processor time of a thread")
def test_relieve_does_not_replace_working_threads(make_pool: MakePool) -> None:
    pool, stop = make_pool(1), threading.Event()
    make_pool.gates.append(stop)
    working = threading.Event()

    def work() -> None:
        while not stop.is_set():
            working.set()

    pool.submit(work)
    assert working.wait(SOON)
    pool.submit(lambda: None)
    for _ in range(3):
        pool.relieve()
        # Lets the job work, by waiting for its progress.
        for _ in range(20):
            working.clear()
            assert working.wait(SOON)
    assert len(pool._threads) == 1
    stop.set()


def test_a_job_that_fails_is_logged_and_its_thread_goes_on(
    make_pool: MakePool, caplog: pytest.LogCaptureFixture
) -> None:
    pool, threads = make_pool(1), []

    def fail() -> None:
        threads.append(threading.current_thread())
        raise LookupError("of the job")

    def exit_thread() -> None:
        raise SystemExit

    pool.submit(fail)
    pool.submit(exit_thread)
    pool.submit(lambda: threads.append(threading.current_thread()))
    done(pool)
    assert threads[0] is threads[1]
    assert "LookupError: of the job" in caplog.text
    assert "A job of test-pool failed" in caplog.text


def test_jobs_run_in_copies_of_the_context(make_pool: MakePool) -> None:
    variable = contextvars.ContextVar("variable", default="unset")
    context = contextvars.Context()
    context.run(variable.set, "of the pool")
    pool, found = make_pool(2, context=context), []
    variable.set("of the caller")

    def job() -> None:
        found.append(variable.get())
        variable.set("changed")

    pool.submit(job)
    done(pool)
    assert found == ["of the pool"]
    assert context.run(variable.get) == "of the pool"


def test_a_finished_job_is_not_kept_alive(make_pool: MakePool) -> None:
    class Thing:
        def __del__(self) -> None:
            ended.set()

    pool, ended = make_pool(1), threading.Event()
    pool.submit(lambda thing=Thing(): None)  # noqa: B008
    assert ended.wait(SOON)


def test_idle_threads_end_at_once(make_pool: MakePool) -> None:
    pool, threads = make_pool(4), set()
    barrier = threading.Barrier(4)

    def job() -> None:
        threads.add(threading.current_thread())
        barrier.wait(SOON)

    for _ in range(4):
        pool.submit(job)
    until(lambda: pool.active == 0 and len(threads) == 4)
    assert all(thread.is_alive() for thread in threads)
    assert pool.close(SOON)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("why", ["the system has no more", "there are enough"])
def test_a_job_waits_if_no_thread_can_be_started(
    make_pool: MakePool,
    jobs: Jobs,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    why: str,
) -> None:
    pool = make_pool(2)
    pool.submit(jobs)
    jobs.await_begun(1)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        if why == "there are enough":
            patch.setattr("zrpc.runtime.thread_pool.MAX_THREADS", 1)
        else:
            patch.setattr(threading.Thread, "start", refuse)
        ran = threading.Event()
        pool.submit(ran.set)
    assert "a call waits" in caplog.text
    assert not ran.is_set()
    jobs.go.set()
    assert ran.wait(SOON)
    assert MAX_THREADS > 1000


def test_a_job_that_was_refused_its_thread_runs_though_no_other_job_comes(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, ran = make_pool(2), threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr("zrpc.runtime.thread_pool.MAX_THREADS", 0)
        pool.submit(ran.set)
        pool.relieve()
        assert not ran.is_set()
    pool.relieve()
    assert ran.wait(SOON)


def test_many_submitters(make_pool: MakePool) -> None:
    pool, count, lock = make_pool(4), [0], threading.Lock()

    def job() -> None:
        with lock:
            count[0] += 1

    def submit() -> None:
        for _ in range(500):
            pool.submit(job)

    threads = [threading.Thread(target=submit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: count[0] == 2000)
    assert len(pool._threads) <= 4

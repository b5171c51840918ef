"""Threads from outside that run jobs of the handler pool, and pool threads that receive."""

from __future__ import annotations

import threading
import time
import weakref
from functools import partial

import pytest

from tests.runtime.pool_jobs import MakePool, admitted, closed_gate
from tests.support.waiting import SOON
from zrpc.runtime import thread_pool
from zrpc.runtime.thread_pool import pass_gate


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


def test_jobs_queued_behind_a_waiting_guest_run_meanwhile(make_pool: MakePool) -> None:
    pool, gate, results = make_pool(1), closed_gate(), []
    me = admitted(pool)
    pool.submit(gate.release)  # nobody else opens it
    pool.run_as_guest(me, [lambda: results.append(pass_gate(gate, SOON))])
    assert results == [True]


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


def test_others_run_while_a_thread_receives(make_pool: MakePool) -> None:
    pool, ran = make_pool(1), threading.Event()

    def receive(gate: threading.Lock, timeout: float) -> None:
        pool.submit(ran.set)
        assert ran.wait(SOON)
        gate.release()

    pool.submit(lambda: pass_gate(closed_gate(), SOON, receive))
    assert ran.wait(SOON)

"""Threads from outside that run jobs of the handler pool, and pool threads that receive."""

from __future__ import annotations

import threading
import time
import weakref
from functools import partial

import pytest

from tests.runtime.pool_jobs import SOON, MakePool, admitted
from zrpc.runtime.job_times import QUICK_JOB_SECONDS
from zrpc.runtime.thread_pool import pass_gate


def test_a_guest_runs_jobs_queued_behind_its_own(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However busy this machine is.
    monkeypatch.setattr("zrpc.runtime.thread_pool.QUICK_JOB_SECONDS", SOON)
    pool, found = make_pool(1), []
    me = admitted(pool)

    def note() -> None:
        found.append(threading.get_ident())

    for _ in range(3):
        pool.submit(note)
    pool.run_as_guest(me, [note])
    assert found == [me] * 4
    assert pool.active == 0


def test_a_guest_runs_no_queued_jobs_after_a_long_one(make_pool: MakePool) -> None:
    pool, found = make_pool(1), []
    me, done = admitted(pool), threading.Event()

    def note() -> None:
        found.append(threading.get_ident())
        done.set()

    def long() -> None:
        end = time.perf_counter() + 2 * QUICK_JOB_SECONDS
        while time.perf_counter() < end:
            pass

    pool.submit(note)
    pool.run_as_guest(me, [long])
    assert done.wait(SOON)
    assert found != [me]


def test_jobs_queued_behind_a_waiting_guest_run_meanwhile(make_pool: MakePool) -> None:
    pool, gate = make_pool(1), threading.Lock()
    me = admitted(pool)
    gate.acquire()
    pool.submit(gate.release)  # nobody else opens it
    results = []
    pool.run_as_guest(me, [lambda: results.append(pass_gate(gate, SOON))])
    assert results == [True]


def test_a_guests_job_is_freed_before_the_next_one_runs(make_pool: MakePool) -> None:
    pool, found = make_pool(1), []
    me = admitted(pool)
    gone = threading.Event()
    argument = threading.Event()
    weakref.finalize(argument, gone.set)
    jobs = [partial(argument.is_set)]
    del argument
    pool.submit(lambda: found.append(gone.is_set()))
    pool.run_as_guest(me, jobs)
    assert found == [True]


@pytest.mark.parametrize("in_a_pool", [True, False])
def test_a_waiting_thread_may_receive_for_itself(make_pool: MakePool, in_a_pool: bool) -> None:
    gates, ended = [threading.Lock(), threading.Lock()], threading.Event()
    for gate in gates:
        gate.acquire()
    found = []

    def job() -> None:
        found.append(pass_gate(gates[0], SOON, lambda gate, timeout: gate.release()))
        found.append(
            pass_gate(gates[1], 0, lambda gate, timeout: found.append(("received", timeout)))
        )
        ended.set()

    if in_a_pool:
        make_pool(1).submit(job)
    else:
        job()
    assert ended.wait(SOON)
    assert found == [True, ("received", 0), False]


def test_nothing_is_received_for_an_open_gate() -> None:
    assert pass_gate(threading.Lock(), SOON, lambda gate, timeout: pytest.fail("received"))


def test_others_run_while_a_thread_receives(make_pool: MakePool) -> None:
    pool, gate, ran = make_pool(1), threading.Lock(), threading.Event()
    gate.acquire()

    def receive(gate: threading.Lock, timeout: float) -> None:
        pool.submit(ran.set)
        assert ran.wait(SOON)
        gate.release()

    pool.submit(lambda: pass_gate(gate, SOON, receive))
    assert ran.wait(SOON)

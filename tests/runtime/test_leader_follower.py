"""The two I/O threads: which one receives, and which one runs jobs."""

from __future__ import annotations

import contextvars
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.support.waiting import until
from zrpc.runtime.leader_follower import LeaderFollower
from zrpc.runtime.thread_pool import HandlerPool, pass_gate

LONG = 30.0


class Desk:
    """I/O threads whose turns take one job each from a queue, instead of messages."""

    def __init__(self, size: int = 2, gate: Callable[[Any], Any] = lambda gate: gate) -> None:
        self.jobs = deque()
        self.arrived = threading.Semaphore(0)
        self.turns = []
        self.pool = HandlerPool(size, "test-worker")
        self.io = LeaderFollower(
            contextvars.copy_context(), "test-io", self.turn, lambda: self.arrived.release()
        )
        self.io._gates = [gate(each) for each in self.io._gates]
        self.io.start()

    def turn(self) -> None:
        self.turns.append(threading.current_thread())
        self.arrived.acquire()
        if not self.jobs:
            return
        job = self.jobs.popleft()
        if not self.io.take(self.pool, job):
            self.pool.submit(job)

    def put(self, job: Callable[[], object]) -> None:
        self.jobs.append(job)
        self.arrived.release()

    def do(self, job: Callable[[], object]) -> threading.Thread:
        """Runs a job and returns the thread that ran it."""
        done = threading.Event()
        threads = []

        def run() -> None:
            job()
            threads.append(threading.current_thread())
            done.set()

        self.put(run)
        assert done.wait(LONG)
        return threads[0]


@pytest.fixture
def make_desk() -> Iterator[Callable[..., Desk]]:
    desks: list[Desk] = []

    def make(*args: Any, **kwargs: Any) -> Desk:
        desks.append(Desk(*args, **kwargs))
        return desks[-1]

    yield make
    for desk in desks:
        assert desk.io.stop(LONG)
        assert desk.pool.close(LONG)


@pytest.fixture
def desk(make_desk: Callable[..., Desk]) -> Desk:
    return make_desk()


pytestmark = pytest.mark.usefixtures("no_leaks")


def settled(desk: Desk) -> None:
    """Waits until both threads are back, so the leader will take the next job."""
    while not desk.do(lambda: None).name.startswith("test-io"):
        pass


def test_a_thread_is_seated_while_it_receives_and_not_while_it_runs_a_job(desk: Desk) -> None:
    settled(desk)
    seen = []
    turn = desk.io._turn
    desk.io._turn = lambda: (seen.append(desk.io.seated()), turn())  # type: ignore[func-returns-value]
    settled(desk)
    assert seen
    assert all(seen)
    in_job = []
    desk.do(lambda: in_job.append(desk.io.seated()))
    assert in_job == [False]
    assert not desk.io.seated()


def test_a_caller_is_seated_while_it_sits() -> None:
    io = LeaderFollower(contextvars.copy_context(), "test-io", lambda: None, lambda: None)
    assert io.sit()  # no leader has started that would hold the seat
    assert io.seated()
    others = []
    thread = threading.Thread(target=lambda: others.append(io.seated()))
    thread.start()
    thread.join()
    assert others == [False]
    io.leave()
    assert not io.seated()


def test_the_leader_runs_quick_jobs(desk: Desk) -> None:
    settled(desk)
    thread = desk.do(lambda: None)
    assert thread.name.startswith("test-io")
    assert thread in desk.turns


def test_a_long_job_does_not_hold_up_others(desk: Desk) -> None:
    settled(desk)
    gate = threading.Event()
    desk.put(lambda: gate.wait(LONG))
    desk.do(gate.set)


def test_jobs_can_wait_for_later_ones(desk: Desk) -> None:
    settled(desk)
    gates = [threading.Lock() for _ in range(8)]
    for gate in gates:
        gate.acquire()
    for gate in gates:
        desk.put(lambda gate=gate: pass_gate(gate, LONG))
    desk.do(lambda: [gate.release() for gate in gates])


def test_a_leader_gives_way_before_it_waits(desk: Desk) -> None:
    settled(desk)
    gate = threading.Lock()
    gate.acquire()
    first = []

    def wait() -> None:
        first.append(threading.current_thread())
        assert pass_gate(gate, LONG)

    desk.put(wait)
    desk.do(gate.release)
    assert first[0] in desk.io._threads


def test_a_job_that_raises_stops_no_thread(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    settled(desk)
    desk.put(lambda: 1 / 0)
    settled(desk)
    assert "A job of test-worker failed" in caplog.text


def test_long_jobs_move_to_the_pool(desk: Desk) -> None:
    settled(desk)
    gate = threading.Event()
    desk.put(lambda: gate.wait(0.01))
    desk.do(lambda: None)
    for _ in range(20):
        gate.clear()
        desk.do(lambda: gate.wait(0.005))
    assert desk.do(lambda: None).name.startswith("test-worker")
    settled(desk)  # after a while, quick jobs return to the leader


def test_after_one_job_that_keeps_its_leader_others_move_to_the_pool(desk: Desk) -> None:
    settled(desk)
    leader = desk.io._leader
    thread = desk.do(lambda: until(lambda: desk.io._leader != leader))
    assert thread is desk.io._threads[leader]
    assert desk.do(lambda: None).name.startswith("test-worker")
    settled(desk)


def test_no_more_jobs_run_than_the_pool_allows() -> None:
    desk = Desk(size=1)
    settled(desk)
    most, running, lock = 0, 0, threading.Lock()

    def job() -> None:
        nonlocal most, running
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.001)
        with lock:
            running -= 1

    for _ in range(30):
        desk.put(job)
    desk.do(lambda: None)
    assert most == 1
    assert desk.io.stop(LONG)
    assert desk.pool.close(LONG)


def test_a_leader_whose_rest_was_too_short_rests_longer_until_a_job_comes(desk: Desk) -> None:
    settled(desk)
    pauses = []
    turn = desk.io._turn

    def turn_with_an_answer() -> None:
        turn()
        pauses.append(desk.io._rest_check_seconds)
        if desk.io._job is None:
            desk.io.rest(0.0)

    desk.io._turn = turn_with_an_answer
    desk.arrived.release(20)
    until(lambda: len(pauses) >= 10)
    settled(desk)
    assert max(pauses) == 8 * min(pauses)
    assert pauses[-1] == min(pauses)


def test_stop_reports_a_job_that_still_runs(desk: Desk) -> None:
    settled(desk)
    gate = threading.Event()
    begun = threading.Event()

    def job() -> None:
        begun.set()
        gate.wait(LONG)

    desk.put(job)
    assert begun.wait(LONG)
    assert not desk.io.stop(0.01)
    gate.set()


def test_stop_from_a_job(desk: Desk) -> None:
    settled(desk)
    desk.do(lambda: desk.io.stop(LONG))


def test_the_threads_can_be_stopped_before_the_second_has_started() -> None:
    waits = threading.Semaphore(0)
    io = LeaderFollower(contextvars.copy_context(), "test-io", waits.acquire, waits.release)
    first, second = io._threads
    first.start()
    assert io.stop(LONG)
    second.start()
    for thread in (first, second):
        thread.join(LONG)
        assert not thread.is_alive()


class SlowGate:
    """A lock that the threads in ``slow`` find open late."""

    def __init__(self, lock: threading.Lock, slow: set[Any], looks: Counter[Any]) -> None:
        self.lock, self.slow, self.looks = lock, slow, looks
        self.locked, self.release = lock.locked, lock.release

    def acquire(self, timeout: float) -> bool:
        me, end = threading.current_thread(), time.monotonic() + timeout
        while me in self.slow or not self.lock.acquire(blocking=False):
            self.looks[me] += 1
            if timeout >= 0 and time.monotonic() > end:
                return False
            time.sleep(0.0001)
        return True


def test_the_old_leader_does_not_take_the_wake_up_of_the_new_one(
    make_desk: Callable[..., Desk],
) -> None:
    """The old leader follows before the new one is awake."""
    slow, looks = set(), Counter()
    desk = make_desk(gate=partial(SlowGate, slow=slow, looks=looks))
    settled(desk)
    until(lambda: any(desk.io._asleep))
    sleeper = desk.io._asleep.index(True)
    slow.add(desk.io._threads[sleeper])
    giver = desk.io._threads[1 - sleeper]
    locked = threading.Lock()
    locked.acquire()
    while desk.do(lambda: pass_gate(locked, 1e-6)) is not giver:
        pass
    before = looks[giver]
    while looks[giver] < before + 50:
        time.sleep(0.001)
    slow.clear()
    settled(desk)


class PausingLock:
    """A lock that stops a thread once, as it leaves the lock after it has passed its gate."""

    def __init__(self, lock: threading.Lock, thread: threading.Thread) -> None:
        self.lock, self.thread = lock, thread
        self.passed = False
        self.reached, self.go_on = threading.Event(), threading.Event()

    def pass_gate(self, gate: threading.Lock, timeout: float) -> bool:
        found = gate.acquire(timeout=timeout)
        self.passed = True
        return found

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()
        if self.passed and threading.current_thread() is self.thread and not self.reached.is_set():
            self.reached.set()
            assert self.go_on.wait(LONG)


class PausingGate:
    """The gate of the thread that a `PausingLock` stops."""

    def __init__(self, gate: threading.Lock, lock: PausingLock) -> None:
        self.gate, self.lock = gate, lock
        self.locked, self.release = gate.locked, gate.release

    def acquire(self, timeout: float) -> bool:
        return self.lock.pass_gate(self.gate, timeout)


def test_a_leader_takes_no_job_while_the_other_thread_is_in_one(desk: Desk) -> None:
    """The follower was promoted between two of its checks, and later gave the lead back."""
    settled(desk)
    until(lambda: any(desk.io._asleep))
    follower = desk.io._asleep.index(True)
    lock = desk.io._lock = PausingLock(desk.io._lock, desk.io._threads[follower])
    # It sleeps at the gate itself, and will pass this one later.
    desk.io._gates[follower] = PausingGate(desk.io._gates[follower], lock)
    lock.passed = True
    closed = threading.Lock()
    closed.acquire()

    def promote_follower() -> None:  # this job has woken it
        assert lock.reached.wait(LONG)
        pass_gate(closed, 1e-6)
        lock.go_on.set()

    desk.do(promote_follower)
    until(lambda: desk.io._ready[1 - follower])
    ran_in = set()

    def wait() -> None:
        ran_in.add(threading.current_thread())
        pass_gate(closed, LONG)

    desk.put(wait)
    try:
        ran_in.add(desk.do(lambda: None))
    finally:
        closed.release()
    assert ran_in != set(desk.io._threads)

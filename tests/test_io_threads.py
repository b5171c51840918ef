import contextvars
import threading
import time
from collections import Counter, deque

import pytest

from zrpc.io_threads import IoThreads
from zrpc.pool import WorkerPool, acquire

LONG = 30.0


class Desk:
    """I/O threads whose turns take one job each from a queue, instead of messages."""

    def __init__(self, size=2):
        self.jobs = deque()
        self.arrived = threading.Semaphore(0)
        self.turns = []
        self.pool = WorkerPool(size, "test-worker")
        self.io = IoThreads(
            contextvars.copy_context(), "test-io", self.turn, lambda: self.arrived.release()
        )
        self.io.start()

    def turn(self):
        self.turns.append(threading.current_thread())
        self.arrived.acquire()
        if not self.jobs:
            return
        job = self.jobs.popleft()
        if not self.io.take(self.pool, job):
            self.pool.submit(job)

    def put(self, job):
        self.jobs.append(job)
        self.arrived.release()

    def do(self, job):
        """Has a job run, and returns the thread in which it did."""
        done = threading.Event()
        threads = []

        def run():
            job()
            threads.append(threading.current_thread())
            done.set()

        self.put(run)
        assert done.wait(LONG)
        return threads[0]


@pytest.fixture
def desk():
    desk = Desk()
    yield desk
    assert desk.io.stop(LONG)
    assert desk.pool.close(LONG)


pytestmark = pytest.mark.usefixtures("no_leaks")


def settled(desk):
    """Has the leader be back, and the follower there, so that the next job is the leader's."""
    while not desk.do(lambda: None).name.startswith("test-io"):
        pass


def test_the_thread_that_receives_runs_quick_jobs(desk):
    settled(desk)
    thread = desk.do(lambda: None)
    assert thread.name.startswith("test-io")
    assert thread in desk.turns


def test_a_job_that_takes_long_holds_up_no_other(desk):
    settled(desk)
    gate = threading.Event()
    desk.put(lambda: gate.wait(LONG))
    desk.do(gate.set)


def test_jobs_that_wait_for_later_ones_hold_up_none(desk):
    settled(desk)
    gates = [threading.Lock() for _ in range(8)]
    for gate in gates:
        gate.acquire()
    for gate in gates:
        desk.put(lambda gate=gate: acquire(gate, LONG))
    desk.do(lambda: [gate.release() for gate in gates])


def test_the_lead_is_given_away_before_a_wait(desk):
    settled(desk)
    gate = threading.Lock()
    gate.acquire()
    first = []

    def wait():
        first.append(threading.current_thread())
        assert acquire(gate, LONG)

    desk.put(wait)
    desk.do(gate.release)
    assert first[0] in desk.io._threads


def test_a_job_that_raises_ends_no_thread(desk, caplog):
    settled(desk)
    desk.put(lambda: 1 / 0)
    settled(desk)
    assert "A job of test-worker failed" in caplog.text


def test_after_long_jobs_the_pool_has_them(desk):
    settled(desk)
    gate = threading.Event()
    desk.put(lambda: gate.wait(0.01))
    desk.do(lambda: None)
    for _ in range(20):
        gate.clear()
        desk.do(lambda: gate.wait(0.002))
    assert desk.do(lambda: None).name.startswith("test-worker")
    settled(desk)  # quick ones go back to the leader, after a while


def test_no_more_jobs_run_than_the_pool_allows():
    desk = Desk(size=1)
    settled(desk)
    most, running, lock = 0, 0, threading.Lock()

    def job():
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


def test_stop_tells_of_a_job_that_still_runs(desk):
    settled(desk)
    gate = threading.Event()
    begun = threading.Event()

    def job():
        begun.set()
        gate.wait(LONG)

    desk.put(job)
    assert begun.wait(LONG)
    assert not desk.io.stop(0.01)
    gate.set()


def test_stop_from_a_job(desk):
    settled(desk)
    desk.do(lambda: desk.io.stop(LONG))


def test_they_can_be_stopped_before_the_second_has_started():
    waits = threading.Semaphore(0)
    io = IoThreads(contextvars.copy_context(), "test-io", waits.acquire, waits.release)
    first, second = io._threads
    first.start()
    assert io.stop(LONG)
    second.start()
    for thread in (first, second):
        thread.join(LONG)
        assert not thread.is_alive()


class SlowGate:
    """A lock at which the threads in ``slow`` take long to notice that it is open."""

    def __init__(self, lock, slow, looks):
        self.lock, self.slow, self.looks = lock, slow, looks
        self.locked, self.release = lock.locked, lock.release

    def acquire(self, timeout):
        me, end = threading.current_thread(), time.monotonic() + timeout
        while me in self.slow or not self.lock.acquire(blocking=False):
            self.looks[me] += 1
            if timeout >= 0 and time.monotonic() > end:
                return False
            time.sleep(0.0001)
        return True


def test_who_gives_away_the_lead_does_not_take_the_call_that_wakes_the_other(desk):
    """It is back before the other one is awake."""
    slow, looks = set(), Counter()
    desk.io._gates = [SlowGate(gate, slow, looks) for gate in desk.io._gates]
    first, second = desk.io._threads
    while not looks[first] or not looks[second]:  # both use these gates now
        desk.do(lambda: time.sleep(0.005))
    settled(desk)
    end = time.monotonic() + LONG
    while not any(desk.io._asleep):
        assert time.monotonic() < end
        time.sleep(0.001)
    sleeper = desk.io._asleep.index(True)
    slow.add(desk.io._threads[sleeper])
    giver = desk.io._threads[1 - sleeper]
    locked = threading.Lock()
    locked.acquire()
    while desk.do(lambda: acquire(locked, 1e-6)) is not giver:
        pass
    before = looks[giver]
    while looks[giver] < before + 50:
        time.sleep(0.001)
    slow.clear()
    settled(desk)

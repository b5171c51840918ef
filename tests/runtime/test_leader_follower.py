"""The two I/O threads: which one receives, and which one runs jobs."""

from __future__ import annotations

import contextvars
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.runtime.pool_jobs import closed_gate
from tests.support.threads import no_more_threads
from tests.support.waiting import SOON
from zrpc.runtime.interrupts import uninterrupted
from zrpc.runtime.leader_follower import LeaderFollower
from zrpc.runtime.thread_pool import HandlerPool, pass_gate

pytestmark = pytest.mark.usefixtures("no_leaks")


class Messages:
    """A source without messages; notes what it is asked to do."""

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self.asked = []
        self.mask, self.unmask = (partial(self.asked.append, each) for each in ("mask", "unmask"))

    def wait(self, timeout: float) -> None:
        self.arrived.wait(timeout)

    def wake(self) -> None:
        self.asked.append("wake")
        self.arrived.set()


class Desk(Messages):
    """I/O threads whose turns take one job each from a queue, instead of messages."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs = deque()
        self.pool = HandlerPool(1, "test-worker")
        self.io = LeaderFollower(contextvars.copy_context(), "test-io", self.turn, self)
        self.io.start()

    def turn(self, until: float) -> float:
        due = time.monotonic() + 0.1
        self.wait(max(0.0, min(until, due) - time.monotonic()))
        self.arrived.clear()
        if not self.jobs:
            return due
        self.io.run(self.pool, self.jobs.popleft())
        if self.jobs:
            self.arrived.set()
        return 0.0

    def put(self, job: Callable[[], object]) -> None:
        self.jobs.append(job)
        self.arrived.set()

    def do(self, job: Callable[[], object] = int) -> str:
        """Runs a job and returns the name of the thread that ran it."""
        done, names = threading.Event(), []

        def run() -> None:
            job()
            names.append(threading.current_thread().name)
            done.set()

        self.put(run)
        assert done.wait(SOON)
        return names[0]

    def settle(self) -> None:
        """Waits until both threads are back, so the leader takes the next job."""
        while not self.do().startswith("test-io"):
            pass


@pytest.fixture
def desk(request: pytest.FixtureRequest) -> Iterator[Desk]:
    desk = getattr(request, "param", Desk)()
    desk.settle()
    yield desk
    assert desk.io.stop(SOON)
    assert desk.pool.close(SOON)


@pytest.mark.parametrize(("timeout", "most"), [(0.005, 0.005), (60.0, 0.01), (-1, 0.01)])
def test_a_caller_receives_for_its_timeout_and_ten_milliseconds_at_most(
    timeout: float, most: float
) -> None:
    asked = []

    def turn(until: float) -> float:
        asked.append(until)
        return until

    io = LeaderFollower(contextvars.copy_context(), "test-io", turn, Messages())
    while not asked:  # the time may be over before the first turn
        begun = time.monotonic()
        io.receive(closed_gate(), timeout)
    (end,) = set(asked)
    assert begun + most <= end <= time.monotonic()


@pytest.mark.parametrize("left", [False, True])
def test_no_message_wakes_the_leader_while_a_caller_receives_but_one_that_it_leaves(
    left: bool,
) -> None:
    gate, messages = closed_gate(), Messages()

    def turn(until: float) -> float:
        messages.asked.append("turn")
        gate.release()
        return -1.0 if left else 0.0

    LeaderFollower(contextvars.copy_context(), "test-io", turn, messages).receive(gate)
    assert messages.asked == ["mask", "turn", "unmask", *["wake"] * left]


def test_if_several_threads_wait_none_of_them_receives() -> None:
    turns = []

    def turn(until: float) -> float:
        turns.append(time.monotonic())
        with ThreadPoolExecutor(1) as pool:  # another thread waits meanwhile
            pool.submit(io.receive, closed_gate()).result()
        return until

    io = LeaderFollower(contextvars.copy_context(), "test-io", turn, Messages())
    while True:
        while not turns:  # the time may be over before the first turn
            io.receive(closed_gate(), 0.001)
        taken, late = len(turns), turns[-1] + 0.01  # the other thread counts until then, at least
        begun = time.monotonic()
        io.receive(closed_gate(), 0.001)
        if begun + 0.005 < late:  # else this machine is busy
            break
        turns.clear()
        threading.Event().wait(0.01)  # until no other thread counts
    assert len(turns) == taken


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_caller_that_an_exception_ends_gives_back_the_seat(error: type[BaseException]) -> None:
    def turn(until: float) -> float:
        raise error

    io = LeaderFollower(contextvars.copy_context(), "test-io", turn, Messages())
    for _ in range(2):
        with ThreadPoolExecutor() as pool, pytest.raises(error):
            pool.submit(io.receive, closed_gate()).result()


class CallsInFlight:
    """One more at each look at them. They call ``look`` at the second one."""

    def __init__(self, look: Callable[[], object]) -> None:
        self._look = look
        self.looks = 0

    def __len__(self) -> int:
        self.looks += 1
        if self.looks == 2:
            self._look()
        return self.looks


class Expected(Messages):
    """I/O threads, and a caller that has just received. Each turn opens the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.led = closed_gate(), threading.Event()
        self.turns: list[str] = []
        self.io = LeaderFollower(contextvars.copy_context(), "test-io", self.turn, self)
        self.io.start()

    def turn(self, until: float) -> float:
        self.arrived.clear()
        self.turns.append(threading.current_thread().name)
        if self.gate.locked():
            self.gate.release()
        if self.turns[-1].startswith("test-io"):
            self.led.set()
        return time.monotonic() + SOON

    def until_paused(self, look: Callable[[], object]) -> CallsInFlight:
        """Lets a message come until the leader pauses for it; ``look`` is called meanwhile."""
        begun = time.monotonic()
        while time.monotonic() < begun + SOON:
            self.io.in_flight = ()
            self.gate.acquire(blocking=False)
            self.io.receive(self.gate)  # the leader may still be in its turn
            self.led.clear()
            calls = self.io.in_flight = CallsInFlight(look)
            self.arrived.set()
            assert self.led.wait(SOON)
            if (
                calls.looks > 1
            ):  # else this machine was too busy for the leader to expect the caller
                return calls
        raise AssertionError("the leader has never paused")


@pytest.fixture
def expected() -> Iterator[Expected]:
    expected = Expected()
    yield expected
    assert expected.io.stop(SOON)


def test_what_comes_while_calls_are_in_flight_is_left_to_a_caller_that_has_just_received(
    expected: Expected,
) -> None:
    gate = closed_gate()

    def receive() -> None:
        expected.gate = gate
        with ThreadPoolExecutor(1, "caller") as pool:
            pool.submit(expected.io.receive, gate).result()

    expected.until_paused(receive)
    assert expected.turns[-2].startswith("caller")
    assert not gate.locked()


def test_a_thread_that_waits_and_does_not_receive_ends_the_pause(expected: Expected) -> None:
    assert expected.until_paused(expected.io.hurry).looks < 5  # with pauses to the end it is 9


def test_a_long_job_does_not_hold_up_others(desk: Desk) -> None:
    desk.pool = HandlerPool(2, "test-worker")
    go_on = threading.Event()
    desk.put(lambda: go_on.wait(SOON))
    desk.do(go_on.set)


def test_long_jobs_move_to_the_pool_and_quick_ones_come_back(desk: Desk) -> None:
    for _ in range(20):
        desk.do(lambda: threading.Event().wait(0.005))
    assert desk.do().startswith("test-worker")
    desk.settle()


class RelievedDesk(Desk):
    """Its turns begin as those of an agent that is due for a tick."""

    def turn(self, until: float) -> float:
        self.io.relieve(self.pool)
        return super().turn(until)


@pytest.mark.system
@pytest.mark.parametrize("desk", [RelievedDesk], indirect=True)
def test_if_the_system_refuses_the_pool_threads_an_io_thread_runs_its_jobs(desk: Desk) -> None:
    desk.pool, ran = HandlerPool(2, "test-worker"), threading.Event()
    with no_more_threads():
        for _ in range(20):
            desk.do(lambda: threading.Event().wait(0.005))
        desk.pool.submit(ran.set)
        assert ran.wait(SOON)
        assert desk.do().startswith("test-io")
    desk.do(desk.do)  # the inner job needs another thread
    assert desk.pool.load(0).threads
    desk.settle()


@pytest.mark.system
def test_jobs_that_wait_for_each_other_all_end_and_never_run_at_once(desk: Desk) -> None:
    """In whichever thread they run, and however soon after each other these lead and follow."""
    source, gates, running, most = random.Random(7), deque(), [], []

    def job(gate: threading.Lock | None, opened: threading.Lock | None) -> None:
        running.append(1)
        most.append(len(running))
        if opened is not None:
            opened.release()
        running.pop()
        if gate is not None:
            assert pass_gate(gate, SOON)

    for number in range(2000):
        waits = source.random() < 0.4
        if waits:
            gates.append(closed_gate())
        opens = len(gates) > waits and source.random() < 0.5
        desk.put(partial(job, gates[-1] if waits else None, gates.popleft() if opens else None))
        if number % 50 == 0:
            desk.do()
    desk.do(lambda: [gate.release() for gate in gates])
    desk.settle()
    assert max(most) == 1


def test_stop_reports_a_job_that_still_runs(desk: Desk) -> None:
    go_on, begun = threading.Event(), threading.Event()
    desk.put(lambda: (begun.set(), go_on.wait(SOON)))
    assert begun.wait(SOON)
    assert not desk.io.stop(0.01)
    go_on.set()


def test_stop_waits_for_a_caller_that_sits_also_if_ctrl_c_ends_it() -> None:
    """Else the caller would read from sockets that are closed meanwhile."""
    stops, sits, left = threading.Event(), threading.Event(), []
    gate = closed_gate()

    class Interrupted(Messages):
        def wake(self) -> None:
            signal.raise_signal(signal.SIGINT)
            stops.set()

    def turn(until: float) -> float:
        sits.set()
        assert stops.wait(SOON)
        threading.Event().wait(0.7)  # its turn goes on
        left.append(True)
        gate.release()
        return until

    io = LeaderFollower(contextvars.copy_context(), "test-io", turn, Interrupted())
    caller = threading.Thread(target=io.receive, args=(gate,))
    caller.start()
    assert sits.wait(SOON)
    io.start()
    with pytest.raises(KeyboardInterrupt), uninterrupted:
        io.stop(SOON)
    assert left
    caller.join()


def test_after_stop_no_caller_receives() -> None:
    """The sockets may be closed."""
    messages = Messages()
    io = LeaderFollower(contextvars.copy_context(), "test-io", lambda until: until, messages)
    io.stop(SOON)
    messages.asked.clear()
    io.receive(closed_gate())
    assert messages.asked == []

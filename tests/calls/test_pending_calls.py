"""The table of calls in flight: each call is settled once, by the thread that takes it out."""

from __future__ import annotations

import contextlib
import gc
import itertools
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.pending import entered_call
from zrpc.calls.future import Future
from zrpc.calls.pending_calls import NEVER, PendingCalls
from zrpc.calls.settling import wait_until_settled
from zrpc.errors import RpcTimeoutError, WorkerDied

SOON = 5.0


@pytest.fixture
def calls() -> Any:
    return PendingCalls()


def test_each_call_gets_its_own_id(calls: Any) -> None:
    ids = {entered_call(calls, peer=0, timeout=0).call_id for _ in range(100)}
    assert len(ids) == len(calls) == 100
    assert 0 not in ids  # stands for no call


def test_a_call_is_taken_out_once(calls: Any) -> None:
    call = entered_call(calls, peer=3, timeout=0)
    assert calls.pop(call.call_id) is call
    assert calls.pop(call.call_id) is None
    assert len(calls) == 0
    assert calls.pop(12345) is None


def test_the_outcome_is_claimed_once(calls: Any) -> None:
    call = entered_call(calls, peer=0, timeout=0)
    assert not call.settled
    assert call.claim() is None
    call.settle("outcome")
    assert call.settled
    assert call.claim() == "outcome"
    assert call.claim() is None


def test_wait_returns_when_the_call_is_settled(calls: Any) -> None:
    call = entered_call(calls, peer=0, timeout=0)
    waiting = [
        threading.Thread(target=wait_until_settled, args=(call,), daemon=True) for _ in range(3)
    ]
    for thread in waiting:
        thread.start()
    calls.pop(call.call_id).settle("outcome")
    for thread in waiting:
        thread.join(SOON)
        assert not thread.is_alive()
    wait_until_settled(call)  # also later
    assert call.claim() == "outcome"


def test_a_follower_is_notified_once_it_is_settled(calls: Any) -> None:
    call, seen = entered_call(calls, peer=0, timeout=0), []

    class Follower:
        def on_settled(self, settled: Any) -> None:
            seen.append((settled is call, settled.settled))

    call.follower = Follower()
    call.settle("outcome")
    assert seen == [(True, True)]


def test_held_objects_live_until_the_call_is_settled(calls: Any) -> None:
    class Thing:
        pass

    thing = Thing()
    reference = weakref.ref(thing)
    call = entered_call(calls, peer=0, timeout=0, holds=thing)
    del thing
    gc.collect()
    assert reference() is not None
    call.settle("outcome")
    gc.collect()
    assert reference() is None


def test_no_timeout(calls: Any) -> None:
    call = entered_call(calls, peer=0, timeout=0)
    assert call.deadline == NEVER
    assert calls.earliest == NEVER
    calls.expire(time.monotonic() + 1e9)
    assert not call.settled


def test_expiry(calls: Any) -> None:
    now = time.monotonic()
    soon, late, never = (entered_call(calls, peer=0, timeout=timeout) for timeout in (1, 10, 0))
    assert now + 1 <= calls.earliest == soon.deadline
    calls.expire(now)
    assert not soon.settled
    calls.expire(soon.deadline)
    assert soon.settled
    assert not late.settled
    assert calls.earliest == late.deadline
    calls.expire(late.deadline + 1)
    assert late.settled
    assert calls.earliest == NEVER
    assert len(calls) == 1
    assert not never.settled


def test_the_error_of_a_timeout(calls: Any) -> None:
    call = entered_call(calls, peer=0, timeout=0.1)
    calls.expire(call.deadline)
    error = call.claim()
    assert isinstance(error, RpcTimeoutError)
    assert str(error) == (
        "RPC ran for more than set timeout (100 ms) and will now be marked with an error: "
        "a request on rank 0. This is the timeout of the call itself"
    )


def test_a_waiter_expires_its_call_itself(calls: Any) -> None:
    call = entered_call(calls, peer=0, timeout=0.01)
    wait_until_settled(call)
    assert isinstance(call.claim(), RpcTimeoutError)
    assert len(calls) == 0


def test_an_answer_that_came_before_the_deadline_counts(calls: Any) -> None:
    # Another thread has taken it from the table: the waiter gets the outcome of that thread.
    call = entered_call(calls, peer=0, timeout=0.01)
    assert calls.pop(call.call_id) is call
    waiting = threading.Thread(target=wait_until_settled, args=(call,), daemon=True)
    waiting.start()
    assert not call.settled
    call.settle("the answer")
    waiting.join(SOON)
    assert not waiting.is_alive()
    assert call.claim() == "the answer"


def test_the_calls_to_one_peer_fail(calls: Any) -> None:
    to_first, to_second = (
        entered_call(calls, peer=1, timeout=0),
        entered_call(calls, peer=2, timeout=0),
    )
    calls.fail(lambda call: WorkerDied(f"peer {call.peer}"), peer=1)
    assert str(to_first.claim()) == "peer 1"
    assert not to_second.settled
    calls.fail(lambda call: WorkerDied("all"))
    assert str(to_second.claim()) == "all"
    assert len(calls) == 0


def test_rank_0_is_a_peer_like_any_other(calls: Any) -> None:
    to_0, to_1 = entered_call(calls, peer=0, timeout=0), entered_call(calls, peer=1, timeout=0)
    calls.fail(lambda call: WorkerDied("gone"), peer=0)
    assert to_0.settled
    assert not to_1.settled


steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "answer", "expire", "fail"]), st.integers(0, 5), st.integers(0, 5)
    ),
    max_size=40,
)


@pytest.mark.system
@settings(deadline=None)
@given(steps)
def test_each_call_is_settled_once_by_its_first_cause(schedule: Any) -> None:
    calls, made, settled = PendingCalls(), [], {}
    now = time.monotonic()

    def note(call: Any, cause: Any) -> None:
        settled.setdefault(call.call_id, cause)

    for what, first, second in schedule:
        if what == "add":
            call = entered_call(calls, peer=first % 3, timeout=0 if second == 0 else 1000 * second)
            made.append(call)
        elif what == "answer" and made:
            call = made[first % len(made)]
            if calls.pop(call.call_id) is not None:
                call.settle("answer")
                note(call, "answer")
        elif what == "expire":
            until = now + 1000 * first + 500
            for call in made:
                if call.deadline <= until:
                    note(call, "timeout")
            calls.expire(until)
            now = max(now, until)
        elif what == "fail":
            for call in made:
                if call.peer == first % 3:
                    note(call, "died")
            calls.fail(lambda call: WorkerDied("gone"), peer=first % 3)
        open_calls = [call for call in made if call.call_id not in settled]
        assert len(calls) == len(open_calls)
        assert calls.earliest <= min([c.deadline for c in open_calls], default=NEVER)
    causes = {"answer": str, "timeout": RpcTimeoutError, "died": WorkerDied}
    for call in made:
        if call.call_id in settled:
            assert isinstance(call.claim(), causes[settled[call.call_id]])
            assert call.claim() is None
        else:
            assert not call.settled


@pytest.mark.system
def test_a_race_for_one_call_has_one_winner(calls: Any) -> None:
    for _ in range(200):
        call = entered_call(calls, peer=0, timeout=0)
        barrier, winners = threading.Barrier(3), []

        def race(
            name: Any, call: Any = call, barrier: Any = barrier, winners: Any = winners
        ) -> None:
            barrier.wait(SOON)
            if calls.pop(call.call_id) is call:
                winners.append(name)

        threads = [threading.Thread(target=race, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(winners) == 1


@contextlib.contextmanager
def ctrl_c_at(number: int) -> Iterator[None]:
    """Sends SIGINT to this process at a call of a Python function in this thread."""
    numbers = itertools.count(1)

    def trace(*_: Any) -> None:
        if next(numbers) == number:
            signal.raise_signal(signal.SIGINT)

    before = sys.gettrace()
    gc.disable()  # what the collector calls can't be interrupted
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
        gc.enable()


ENDS = {
    "cancel": lambda call: call.cancel(),
    "withdraw": lambda call: call.withdraw(),
    "fail": lambda call: call.fail(RpcTimeoutError("late")),
    "wait": wait_until_settled,
    "fail all": lambda call: call._calls.fail(lambda _: RpcTimeoutError("lost")),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_ctrl_c_leaves_no_call_that_is_taken_and_not_settled(end: Any) -> None:
    for number in itertools.count(1):
        settled = []
        calls = PendingCalls(on_settled=settled.append)
        call = entered_call(calls, peer=0, timeout=1e-6)
        try:
            with ctrl_c_at(number):
                end(call)
        except KeyboardInterrupt:
            in_table = calls.get(call.call_id) is call
            assert settled == ([] if in_table else [call])
            assert call.settled is not in_table
        else:
            break
    assert number > 3


class SlowCompletions:
    """Waits until another thread settles the call; what a third one must do is done later."""

    def __init__(self, call: Any) -> None:
        self.jobs: list[Any] = []
        self.complete = self.jobs.append
        self._waits, self._settled = threading.Lock(), threading.Lock()
        self._waits.acquire()
        self._settled.acquire()
        self._io_thread = threading.Thread(target=self._settle, args=(call,))
        self._io_thread.start()

    def _settle(self, call: Any) -> None:
        self._waits.acquire()
        call._calls.pop(call.call_id).settle("outcome")
        self._settled.release()

    def wait(self, call: Any) -> None:
        call.waiters = (threading.get_ident(),)
        self._waits.release()
        self._settled.acquire()
        call.waiters = ()  # it notes this thread again
        wait_until_settled(call)

    def decode(self, outcome: Any) -> Any:
        return outcome

    def end(self) -> None:
        if self._waits.locked():
            self._waits.release()
        self._io_thread.join()
        for job in self.jobs:
            job()


def test_ctrl_c_in_a_wait_leaves_no_future_that_nobody_completes() -> None:
    for number in itertools.count(1):
        call = entered_call(PendingCalls(), peer=0, timeout=0)
        calling = SlowCompletions(call)
        future: Any = Future.of_call(call, calling)
        try:
            with ctrl_c_at(number):
                future.wait()
        except KeyboardInterrupt:
            calling.end()
            assert torch.futures.Future.done(future), f"interrupted at call {number}"
        else:
            break
    calling.end()
    assert number > 5

"""The table of calls in flight: each is settled once, and takes room as long as it is in flight."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Hashable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zrpc as rpc
from tests.support.pending import Callees, bytes_in_flight, entered_call, queued, table
from tests.support.steps import at_step, interrupt
from tests.support.threads import start_all
from tests.support.waiting import SOON, until
from zrpc.calls.pending_call import NEVER, PendingCall, State
from zrpc.calls.pending_calls import OVERHEAD_BYTES, PendingCalls
from zrpc.errors import NotInitializedError, RpcCancelledError, RpcTimeoutError, WorkerDied
from zrpc.testing import Mesh
from zrpc.wire.member_id import MemberId

KIB = OVERHEAD_BYTES  # the bytes that a call takes besides its message


@pytest.fixture
def calls() -> PendingCalls:
    return table()


def test_a_call_has_an_id_and_is_settled_and_its_outcome_claimed_once(calls: PendingCalls) -> None:
    made = [entered_call(calls, peer=3, timeout=0) for _ in range(100)]
    assert len({call.call_id for call in made} - {0}) == len(calls) == 100  # 0 stands for no call
    call = made[0]
    call.holds = "an RRef"
    assert (call.settled, call.claim()) == (False, None)
    assert calls.settle(call.call_id, "outcome") is call
    assert call.holds is None
    assert calls.settle(call.call_id, "another") is None
    assert calls.settle(12345, "another") is None
    assert (call.settled, call.claim(), call.claim()) == (True, "outcome", None)
    assert len(calls) == 99


@pytest.mark.parametrize(
    "end", [lambda calls: calls.expire(NEVER), lambda calls: calls.fail(WorkerDied)]
)
def test_a_follower_that_fails_holds_up_no_other_call(
    calls: PendingCalls, end: Callable[[PendingCalls], None]
) -> None:
    class Follower:
        def on_settled(self, call: PendingCall) -> None:
            raise MemoryError

    ended = [entered_call(calls, peer=0, timeout=9) for _ in range(3)]
    ended[0].follower = Follower()
    with pytest.raises(MemoryError):
        end(calls)
    assert [call.settled for call in ended] == [True] * 3


def test_a_follower_that_there_is_no_memory_for_is_notified_in_the_next_turn() -> None:
    callees = Callees()
    calls, found = table(callees=callees), list[Any]()

    class Follower:
        def on_settled(self, call: PendingCall) -> None:
            if not callees.errands:
                raise MemoryError
            found.append(call.claim())

    call = entered_call(calls, peer=0, timeout=0)
    call.follower = Follower()
    with pytest.raises(MemoryError):
        calls.settle(call.call_id, "outcome")
    [errand] = callees.errands
    errand()
    assert found == ["outcome"]


def test_calls_expire_at_their_deadlines_which_may_be_postponed(calls: PendingCalls) -> None:
    now = time.monotonic()
    never = entered_call(calls, peer=0, timeout=0)
    assert never.deadline == calls.earliest == NEVER
    soon, late = (entered_call(calls, peer=0, timeout=timeout) for timeout in (0.1, 10))
    assert now + 0.1 <= calls.earliest == soon.deadline
    calls.expire(now)
    assert not soon.settled
    calls.expire(soon.deadline)
    assert isinstance(soon.claim(), RpcTimeoutError)
    assert calls.earliest == late.deadline
    calls.postpone(5.0)
    calls.expire(late.deadline - 1)
    assert not late.settled
    calls.expire(time.monotonic() + 1e9)
    assert late.settled
    assert (calls.earliest, len(calls), never.settled) == (NEVER, 1, False)


def test_a_table_that_is_closed_takes_no_more_calls(calls: PendingCalls) -> None:
    call = entered_call(calls, peer=0, timeout=0)
    calls.close()
    assert isinstance(call.claim(), NotInitializedError)
    with pytest.raises(NotInitializedError):
        entered_call(calls, peer=0, timeout=0)
    assert len(calls) == 0


def test_only_sent_calls_are_cancelled_at_the_callee() -> None:
    callees: Any = Callees()
    calls = table(KIB, callees)
    sent, unsent = Sender(calls).send(0), Sender(calls)
    waiting = unsent.start(0)
    assert sent.cancel()
    assert not sent.cancel()
    assert callees.cancelled == [sent]
    waiting.cancel()
    assert callees.cancelled == [sent, waiting]  # it had got room
    calls.fail(lambda _: WorkerDied("gone"))


steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "answer", "expire", "fail"]), st.integers(0, 5), st.integers(0, 5)
    ),
    max_size=40,
)


@pytest.mark.system
@given(steps)
def test_each_call_is_settled_once_by_its_first_cause(schedule: Any) -> None:
    calls, made, settled = table(), [], {}
    now = time.monotonic()

    def note(call: Any, cause: Any) -> None:
        settled.setdefault(call.call_id, cause)

    for what, first, second in schedule:
        if what == "add":
            call = entered_call(calls, peer=first % 3, timeout=0 if second == 0 else 1000 * second)
            made.append(call)
        elif what == "answer" and made:
            call = made[first % len(made)]
            if calls.settle(call.call_id, "answer") is not None:
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
            calls.fail(lambda call: WorkerDied("gone"), peer=MemberId(first % 3))
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
def test_a_race_for_one_call_has_one_winner(calls: PendingCalls) -> None:
    for _ in range(200):
        call = entered_call(calls, peer=0, timeout=0)
        barrier = threading.Barrier(3)

        def race(call: PendingCall = call, barrier: threading.Barrier = barrier) -> bool:
            barrier.wait(SOON)
            return calls.settle(call.call_id, "outcome") is call

        assert sum(start_all([race] * 3, SOON)()) == 1


# -- room ----------------------------------------------------------------------------------


class Sender:
    """A thread that enters calls, and waits for room for them."""

    def __init__(self, calls: PendingCalls) -> None:
        self.calls = calls
        self.call: Any = None
        self.state: State | None = None
        self._thread: threading.Thread | None = None

    def send(
        self, size: int, peer: int = 1, caller: Hashable = None, timeout: float = SOON
    ) -> PendingCall:
        """Enters a call with a message of this size, and waits for room."""
        self.call = PendingCall(self.calls, MemberId(peer), timeout)
        self.state = self.calls.enter(self.call, size, caller)
        if self.state is State.QUEUED:
            self.state = self.calls.await_room(self.call)
        return self.call

    def start(self, *args: Any) -> PendingCall:
        """Does the same in another thread, and waits until the call is queued."""
        before = queued(self.calls)
        self._thread = threading.Thread(target=self.send, args=args)
        self._thread.start()
        until(lambda: queued(self.calls) > before)
        return self.call

    def end(self) -> State | None:
        """Returns the call's state when the thread goes on."""
        assert self._thread is not None
        self._thread.join(SOON)
        return self.state


def answer(calls: PendingCalls, call: PendingCall) -> None:
    assert calls.settle(call.call_id, "answer") is call


def test_calls_that_fit_go_at_once_and_one_that_is_larger_than_the_limit() -> None:
    for limit, sizes in ((10 * KIB, [4 * KIB] * 2), (KIB, [1000 * KIB]), (0, [1000 * KIB] * 5)):
        calls = table(limit)
        sent = [Sender(calls).send(size) for size in sizes]
        assert {call.state for call in sent} == {State.SENDING}
        assert bytes_in_flight(calls) == (sum(sizes) + len(sizes) * KIB if limit else 0)
        for call in sent:
            answer(calls, call)
        assert bytes_in_flight(calls) == 0


def test_first_come_first_served() -> None:
    calls = table(10 * KIB)
    first = Sender(calls).send(8 * KIB)
    large, small = Sender(calls), Sender(calls)
    large.start(8 * KIB)
    small.start(0)  # would fit, but for the one before it
    answer(calls, first)
    assert large.end() is small.end() is State.SENDING
    assert bytes_in_flight(calls) == 10 * KIB


def test_calls_to_a_lost_peer_no_longer_wait() -> None:
    calls = table(10 * KIB)
    Sender(calls).send(9 * KIB)
    waiting = [Sender(calls) for _ in range(3)]
    for each in waiting:
        each.start(9 * KIB)
    calls.fail(lambda _: ConnectionError("lost"), MemberId(1))
    assert not {each.end() for each in waiting} & {State.QUEUED, State.SENDING}
    assert bytes_in_flight(calls) == queued(calls) == 0


def test_many_threads() -> None:
    calls = table(8 * KIB)
    most = []

    def run() -> None:
        for size in range(50):
            call = Sender(calls).send(size * 100)
            assert call.state is State.SENDING
            most.append(bytes_in_flight(calls))
            answer(calls, call)

    start_all([run] * 8, SOON)()
    assert len(most) == 400
    assert max(most) <= 8 * KIB
    assert bytes_in_flight(calls) == 0


def test_cancellations_race_with_new_room() -> None:
    calls = table(KIB)
    for _ in range(100):
        first, sender = Sender(calls).send(0), Sender(calls)
        call = sender.start(0)
        start_all([lambda first=first: answer(calls, first), call.cancel], SOON)()
        sender.end()
        assert isinstance(call.claim(), RpcCancelledError)
        assert bytes_in_flight(calls) == queued(calls) == 0


@pytest.mark.parametrize("room_first", [False, True])
def test_an_event_loop_is_told_once_of_room(room_first: bool) -> None:
    calls, told = table(KIB), []
    first = Sender(calls).send(0)
    call = PendingCall(calls, MemberId(1), 0)
    assert calls.enter(call, 0) is State.QUEUED
    if room_first:
        answer(calls, first)
    calls.when_room(call, lambda: told.append(call.state))
    if not room_first:
        assert told == []
        answer(calls, first)
    assert told == [State.SENDING]
    answer(calls, call)
    assert told == [State.SENDING]


# -- Ctrl-C ----------------------------------------------------------------------------------


ENDS: dict[str, Callable[[PendingCall], object]] = {
    "cancel": lambda call: call.cancel(),
    "withdraw": lambda call: call.withdraw(),
    "fail": lambda call: call.fail(RpcTimeoutError("late")),
    "expire": lambda call: call.expire(),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_ctrl_c_leaves_no_call_that_is_taken_and_not_settled(
    end: Callable[[PendingCall], object],
) -> None:
    for number in itertools.count(1):
        calls = table()
        call = entered_call(calls, peer=0, timeout=1e-6)
        with contextlib.suppress(KeyboardInterrupt), at_step(number, interrupt) as steps:
            end(call)
        assert call.settled is (calls.get(call.call_id) is not call), steps.place
        if not steps.place:
            break
    assert number > 3


def test_after_ctrl_c_at_any_step_of_a_wait_the_callbacks_are_called(mesh: Mesh) -> None:
    places = []
    with mesh.agent(0).as_current():
        for number in range(1, 60):  # a wait takes fewer if the answer comes soon
            future, done = rpc.rpc_async(1, max, (1, 2)), threading.Event()
            future.add_done_callback(lambda _, done=done: done.set())  # type: ignore[misc]
            with contextlib.suppress(KeyboardInterrupt), at_step(number, interrupt) as steps:
                future.wait()
            assert done.wait(SOON), steps.place
            places.append(steps.place)
    assert sum(map(bool, places)) > 20

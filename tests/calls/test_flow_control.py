from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.pending import entered_call
from zrpc import RpcCancelledError, RpcTimeoutError
from zrpc.calls.flow_control import OVERHEAD_BYTES, Admission, FlowControl
from zrpc.calls.pending_calls import PendingCalls

LONG = 30.0
KIB = OVERHEAD_BYTES  # the bytes that a call takes besides its message


class Peers:
    """A table of calls, and a window for them."""

    def __init__(self, limit: Any) -> None:
        self.window = FlowControl(limit)
        self.calls = PendingCalls(on_settled=self.window.leave, unsent=self.window.no_room)

    def call(self, size: Any, peer: int = 1, caller: Any = None, timeout: Any = LONG) -> Any:
        """Enters a call; returns it, and whether it may be sent."""
        call = entered_call(self.calls, peer, timeout)
        return call, self.window.enter(call, caller, size) is not Admission.SETTLED

    def answer(self, call: Any) -> None:
        assert self.calls.pop(call.call_id) is call
        call.settle("answer")

    def waiting_call(self, *args: Any, **kwargs: Any) -> Any:
        """Enters a call in another thread, which must wait."""
        thread = threading.Thread(target=lambda: found.append(self.call(*args, **kwargs)))
        found = []
        before = self.queued()
        thread.start()
        while self.queued() == before:
            threading.Event().wait(0.001)
        return thread, found

    def queued(self) -> Any:
        return sum(map(len, self.window._waiting.values()))


def test_calls_that_fit_go_at_once() -> None:
    peers = Peers(10 * KIB)
    calls = [peers.call(4 * KIB) for _ in range(2)]
    assert all(sent for _, sent in calls)
    assert len(peers.window) == 10 * KIB
    for call, _ in calls:
        peers.answer(call)
    assert len(peers.window) == 0


def test_one_call_may_be_larger_than_the_window() -> None:
    peers = Peers(KIB)
    call, sent = peers.call(1000 * KIB)
    assert sent
    peers.answer(call)
    assert len(peers.window) == 0


def test_no_limit() -> None:
    peers = Peers(0)
    assert all(peers.call(1000 * KIB)[1] for _ in range(5))
    assert len(peers.window) == 0


def test_a_call_waits_for_room() -> None:
    peers = Peers(10 * KIB)
    first, _ = peers.call(9 * KIB)
    thread, found = peers.waiting_call(0)
    peers.answer(first)
    thread.join(LONG)
    [(call, sent)] = found
    assert sent
    assert len(peers.window) == KIB
    peers.answer(call)
    assert len(peers.window) == 0


def test_first_come_first_served() -> None:
    peers = Peers(10 * KIB)
    first, _ = peers.call(8 * KIB)
    large, found_large = peers.waiting_call(8 * KIB)
    small, found_small = peers.waiting_call(0)  # would fit, but for the one before it
    peers.answer(first)
    for thread in (large, small):
        thread.join(LONG)
    assert found_large[0][1]
    assert found_small[0][1]
    assert len(peers.window) == 10 * KIB


@pytest.mark.parametrize("other", [{"peer": 2}, {"caller": 7}])
def test_other_peers_and_callers_have_their_own_windows(other: Any) -> None:
    peers = Peers(10 * KIB)
    peers.call(9 * KIB)
    assert peers.call(9 * KIB, **other)[1]


def test_the_deadline_holds_in_the_queue() -> None:
    peers = Peers(10 * KIB)
    first, _ = peers.call(9 * KIB)
    call, sent = peers.call(9 * KIB, timeout=0.02)
    assert not sent
    with pytest.raises(RpcTimeoutError, match=r"not sent within.*20 ms.*max_bytes_in_flight"):
        raise call.claim()
    peers.answer(first)
    assert len(peers.window) == 0
    assert len(peers.calls) == 0


def test_the_error_names_the_limit_if_the_io_thread_sees_the_deadline_first() -> None:
    peers = Peers(10 * KIB)
    peers.call(9 * KIB, timeout=0)
    thread, found = peers.waiting_call(KIB)
    peers.calls.expire(time.monotonic() + 2 * LONG)
    thread.join(LONG)
    [(call, sent)] = found
    assert not sent
    error = call.claim()
    assert isinstance(error, RpcTimeoutError)
    assert "max_bytes_in_flight" in str(error)


def test_a_call_that_has_left_does_not_blame_the_limit() -> None:
    peers = Peers(10 * KIB)
    call, _ = peers.call(9 * KIB)
    peers.calls.expire(time.monotonic() + 2 * LONG)
    assert "max_bytes_in_flight" not in str(call.claim())


def test_calls_to_a_lost_peer_no_longer_wait() -> None:
    peers = Peers(10 * KIB)
    peers.call(9 * KIB)
    waiting = [peers.waiting_call(9 * KIB) for _ in range(3)]
    peers.calls.fail(lambda _: ConnectionError("lost"), 1)
    for thread, found in waiting:
        thread.join(LONG)
        assert not found[0][1]
    assert len(peers.window) == 0
    assert peers.queued() == 0


def test_a_call_that_is_settled_before_it_is_sent_takes_no_room() -> None:
    peers = Peers(10 * KIB)
    call = entered_call(peers.calls, 1, LONG)
    peers.calls.fail(lambda _: ConnectionError("lost"))
    assert peers.window.enter(call, None, KIB) is Admission.SETTLED
    assert len(peers.window) == 0


def test_many_threads() -> None:
    peers = Peers(8 * KIB)
    most = []

    def run() -> None:
        for size in range(50):
            call, sent = peers.call(size * 100)
            assert sent
            most.append(len(peers.window))
            peers.answer(call)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert len(most) == 400
    assert max(most) <= 8 * KIB
    assert len(peers.window) == 0


def test_a_call_that_is_cancelled_while_it_waits() -> None:
    peers = Peers(10 * KIB)
    first, _ = peers.call(9 * KIB)
    before, cancelled = peers.waiting_call(9 * KIB)[0], peers.waiting_call(9 * KIB)
    call = list(peers.calls._calls.values())[-1]
    assert call.cancel()
    cancelled[0].join(LONG)
    assert cancelled[1] == [(call, False)]
    assert peers.queued() == 1
    assert isinstance(call.claim(), RpcCancelledError)
    peers.answer(first)
    before.join(LONG)
    assert len(peers.window) == 10 * KIB


def test_cancellations_race_with_new_room() -> None:
    peers = Peers(KIB)
    for _ in range(100):
        first, _ = peers.call(0)
        thread, found = peers.waiting_call(0)
        call = list(peers.calls._calls.values())[-1]
        answering = threading.Thread(target=peers.answer, args=(first,))
        answering.start()
        call.cancel()
        answering.join(LONG)
        thread.join(LONG)
        assert found[0][0] is call
        assert len(peers.window) == 0
        assert peers.queued() == 0


class Interruption(BaseException):
    pass


@contextlib.contextmanager
def interruption_at(number: int) -> Iterator[None]:
    """Raises in this thread at a call of a Python function, as the handler of a signal may."""
    calls = itertools.count(1)

    def trace(*_: Any) -> None:
        if next(calls) == number:
            raise Interruption

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("used", [0, 4 * KIB])
def test_an_interruption_at_any_call_leaves_no_room_taken(used: int) -> None:
    for number in itertools.count(1):
        peers = Peers(10 * KIB)
        if used:
            peers.call(used - KIB)
        call = entered_call(peers.calls, 1, LONG)
        try:
            with interruption_at(number):
                peers.window.enter(call, None, KIB)
        except Interruption:
            assert call.cancel()
            assert len(peers.window) == used
        else:
            break
    assert number > 3


class TellingGate:
    """The gate of a call, which tells when a thread begins to wait for its outcome."""

    def __init__(self, waits: threading.Event) -> None:
        gate = threading.Lock()
        gate.acquire()
        self.release, self.locked = gate.release, gate.locked
        self._acquire, self._waits = gate.acquire, waits

    def acquire(self, *arguments: Any) -> bool:
        self._waits.set()
        return self._acquire(*arguments)


def test_a_call_that_another_thread_is_about_to_fail_is_not_sent() -> None:
    """Both find that its deadline has passed; the one that took it settles it a moment later."""
    peers = Peers(10 * KIB)
    first, _ = peers.call(9 * KIB, timeout=0)
    call: Any = entered_call(peers.calls, 1, 0.02)
    taken, go_on = threading.Event(), threading.Event()
    call.gate = TellingGate(go_on)

    class Marks:
        """Pauses the thread that settles the call, once it has taken it from the table."""

        def on_settled(self, *_: Any) -> None:
            taken.set()
            assert go_on.wait(LONG)

    call.marks = Marks()
    io_thread = threading.Thread(
        target=peers.calls.expire, args=(time.monotonic() + LONG,), daemon=True
    )
    io_thread.start()
    assert taken.wait(LONG)
    admission = peers.window.enter(call, None, KIB)
    go_on.set()
    io_thread.join(LONG)
    assert admission is Admission.SETTLED
    peers.answer(first)
    assert len(peers.window) == 0
    assert peers.queued() == 0

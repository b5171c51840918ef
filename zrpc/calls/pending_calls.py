"""The table of a worker's calls in flight: their states, deadlines and bytes.

No I/O in here. One lock guards the table and the state of each call in it. The thread that takes a
call out of the table settles it, once: the I/O thread with an answer, a deadline, or the loss of
the peer; or the caller, if its own wait ran out. What others must be told of a call is told after
the lock is released.

**Flow control.** Only a limited number of bytes may be in flight to each peer. A call counts as
much as its message and, for its other parts, 2 KiB, so that the number of small calls is bounded as
well. A call that does not fit is *queued*: it waits until answers have made room. So neither the
caller's queue nor the callee's grows without limit if the callee is slower.

Calls from a handler are counted apart for as long as they come from the same thread (or asyncio
task): what a handler calls must never wait for the calls that wait for this handler.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

from zrpc.calls.call_counters import CallCount, Table
from zrpc.calls.callees import Callees
from zrpc.calls.pending_call import NEVER, PendingCall, Room, State, Window
from zrpc.errors import (
    RpcCancelledError,
    RpcError,
    RpcTimeoutError,
    deadline_passed,
    has_shut_down,
)
from zrpc.runtime.interrupts import uninterrupted
from zrpc.runtime.thread_pool import pass_gate
from zrpc.wire.kind import Kind
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message

# What the parts of a call other than its message occupy, in bytes, at the caller and at the callee;
# measured: 1.8 and 1.5 kB. So it bounds the number of small calls.
OVERHEAD_BYTES = 2048

# Looked up once, since each call needs them: an enum takes longer for that than a module.
_QUEUED, _SENDING, _UNSENT, _SETTLED = State.QUEUED, State.SENDING, State.UNSENT, State.SETTLED
_ERROR = int(Kind.ERROR)


class Load(NamedTuple):
    """The calls to one peer from callers of one kind.

    Attributes:
        of_handler: whether the callers are one handler.
        used: the bytes in flight.
        waiting: the number of calls that wait for room.
    """

    of_handler: bool
    used: int
    waiting: int


class PendingCalls:
    """The table of calls in flight. Any thread may call its methods.

    A thread that enters or settles calls has signal handlers held back: one of them might make a
    call, which needs the lock.

    Args:
        callees: the peers of the calls.
        limit: the most bytes in flight to one peer; a single call may be larger. 0: no limit.
        in_next_turn: has something done in the I/O thread soon; takes no locks.

    Attributes:
        limit: the same.
        counts: of the calls that are settled.
        ids: the ids of calls.
        by_id: the calls in the table, the oldest first.
        earliest: a time before which no call expires, on the clock of ``time.monotonic``.
        postponed: by how many seconds deadlines were ever postponed.
    """

    def __init__(
        self,
        callees: Callees,
        limit: int,
        in_next_turn: Callable[[Callable[[], object]], None],
    ) -> None:
        self._callees = callees
        self._in_next_turn = in_next_turn
        self._lost = callees.lost
        self.limit = limit
        self.counts = Table(CallCount)
        self.ids: Iterator[int] = itertools.count(1)
        # Guards what follows, and the state, the window and the parent of each call. Only that of
        # the cancel scopes is taken while it is held.
        self._lock = threading.Lock()
        self.by_id: dict[int, PendingCall] = {}
        # Settled ones whose futures the threads that wait for them complete, until they have. Weak,
        # since a signal handler may interrupt such a thread as it takes out its call.
        self.handed: set[weakref.ref[PendingCall]] = set()
        self._windows: dict[tuple[MemberId, Hashable], Window] = {}
        self._closed = False
        self.earliest = NEVER
        self.postponed = 0.0

    def __len__(self) -> int:
        return len(self.by_id)

    def enter(self, call: PendingCall, size: int = -1, caller: Hashable = None) -> State:
        """Puts a call into the table.

        Args:
            call: the call, not sent yet.
            size: of its message, in bytes; negative if it needs no room.
            caller: the handler that it is counted with; None if no handler has made it.

        Returns:
            SENDING if it may be sent, QUEUED if it must wait for room (see `await_room` and
            `when_room`), or UNSENT if it is settled already: its peer is lost, its deadline has
            passed, or its handler was cancelled.

        Raises:
            NotInitializedError: the table is closed.
        """
        with self._lock:
            if self._closed:
                raise has_shut_down()
            self.by_id[call.call_id] = call
            if call.deadline < self.earliest:
                self.earliest = call.deadline
            lost, late = call.peer in self._lost, call.deadline < call.begun
            if not lost and not late and (call.parent is None or call.parent.adopt(call)):
                if size < 0 or not self.limit:
                    call.state = _SENDING
                    return _SENDING
                window = self._windows.get((call.peer, caller))
                if window is None:
                    window = self._windows[call.peer, caller] = Window(call.peer, caller)
                size += OVERHEAD_BYTES
                fits = window.used + size <= self.limit and not window.queue
                if fits or not window.used:
                    window.used += size
                    call.state = _SENDING
                else:
                    call.room = Room()
                    window.queue.append(call)
                    call.state = _QUEUED
                call.window, call.size = window, size
                return call.state
        if lost:
            self.settle(call.call_id, self._callees.died(call))
        elif late:
            self.expire_call(call)
        else:
            self.cancel(call)
        return call.state

    def await_room(self, call: PendingCall) -> State:
        """Waits until a queued call has room or is settled, at most until its deadline.

        Returns:
            SENDING or UNSENT.
        """
        room = call.room
        assert room is not None
        room.thread = threading.get_ident()
        while not pass_gate(room.gate, call.remaining()):
            if not call.remaining():  # or its deadline was postponed meanwhile
                call.expire()
                # If another thread has taken it from the table, that thread settles it at once.
                pass_gate(call.gate)
                break
        return call.state

    def when_room(self, call: PendingCall, go: Callable[[], None]) -> None:
        """Calls ``go()`` when a queued call has room or is settled; see `Room`."""
        with self._lock:
            if call.state is _QUEUED:
                assert call.room is not None
                call.room.go = go
                return
        go()

    # -- the end of calls ------------------------------------------------------------------

    def settle(self, call_id: int, outcome: Any, notify: bool = True) -> PendingCall | None:
        """Takes a call out of the table, and settles it.

        Args:
            call_id: of the call.
            outcome: an answer, or an error.
            notify: whether its follower is told.

        Returns:
            The call; None if it isn't in the table, or no longer: then another thread settles it.
        """
        ready: list[Callable[[], None]] = []
        with self._lock:
            call = self.by_id.get(call_id)
            if call is None:
                return None
            window = call.window
            if window is not None:
                if window.queue:
                    self._let_in(window, call, ready)
                else:
                    window.used -= call.size
                    if not window.used and window.caller is not None:  # it may not call any more
                        del self._windows[window.peer, window.caller]
                call.window = None
            handed = call.follower is not None and bool(call.waiters)
            if handed:
                self.handed.add(weakref.ref(call, self.handed.discard))
            call.state = _SETTLED if call.state is _SENDING else _UNSENT
            del self.by_id[call_id]  # last: if anything fails, the call is still in the table
        if type(outcome) is Message:
            failed = outcome.kind == _ERROR
        else:
            failed = outcome is not None
            if call.state is _UNSENT and isinstance(outcome, RpcError):
                outcome.executed = False
        now = monotonic()
        try:
            # Before the gate opens: a program that has the answer finds the call counted.
            self.counts[call.what or call.kind].add(now - call.begun, failed)
            if call.observation is not None:
                call.observation.on_settled(call, outcome, failed, now)
        finally:  # whatever fails, if there is no memory for a frame, say: nobody waits without end
            call.holds = None
            call.outcome = [outcome]
            call.gate.release()
            try:
                if call.parent is not None:
                    call.parent.release(call)
                if ready:
                    self._let_go(ready)
            finally:
                if ready:  # one has failed
                    self._in_next_turn(partial(self._let_go, ready))
                if call.follower is not None:
                    follower, call.follower = call.follower, None  # or the two keep each other
                    try:
                        if not (notify and follower.on_settled(call)) and handed:
                            self.handed.discard(weakref.ref(call))
                    except BaseException:
                        if call.outcome:  # it has not begun, for lack of memory: once more
                            self._in_next_turn(partial(follower.on_settled, call))
                        raise
        return call

    def _let_in(self, window: Window, ended: PendingCall, ready: list[Callable[[], None]]) -> None:
        """Lets in the queued calls that fit when one has ended; the lock is held.

        It adds to ``ready`` the functions that let these calls go on. If the call that has ended
        was queued, it is one of them.
        """
        queue = window.queue
        if ended.state is _SENDING:
            window.used -= ended.size
        else:
            queue.remove(ended)
            assert ended.room is not None
            ready.append(ended.room.go)
        while queue and (not window.used or window.used + queue[0].size <= self.limit):
            first = queue.popleft()
            first.state = _SENDING
            window.used += first.size
            assert first.room is not None
            ready.append(first.room.go)
        if not window.used and window.caller is not None:  # that handler may not call any more
            del self._windows[window.peer, window.caller]

    def _let_go(self, ready: list[Callable[[], None]]) -> None:
        """Lets calls go on that were let in; takes them out."""
        while ready:
            ready[0]()
            del ready[0]

    def give_back_room(self, call: PendingCall) -> None:
        """Lets others use a call's room, since its callee has begun, and sends parts of an answer.

        In the I/O thread.
        """
        ready: list[Callable[[], None]] = []
        with self._lock:
            window = call.window
            if window is not None and call.call_id in self.by_id:
                self._let_in(window, call, ready)
                call.window = None
        try:
            self._let_go(ready)
        finally:
            if ready:  # one has failed
                self._in_next_turn(partial(self._let_go, ready))

    def cancel(self, call: PendingCall) -> bool:
        """Settles a call with an error and has the callee told; see `PendingCall.cancel`."""
        to = self._callees.describe(call.peer)
        error = RpcCancelledError(f"the call of {call.title} on {to} was cancelled by its caller")
        with uninterrupted:
            try:
                if self.settle(call.call_id, error) is None:
                    return False
                self._tell_cancelled(call)
            except BaseException:  # no memory for a frame: the callee would go on, for nobody
                self._tell_cancelled(call)
                raise
            return True

    def _tell_cancelled(self, call: PendingCall) -> None:
        """Tells the callee of a call that it is over, if the call was sent."""
        if call.state is _SETTLED:
            self._callees.tell_cancelled(call)

    def withdraw(self, call: PendingCall) -> bool:
        """Ends a call without an outcome; see `PendingCall.withdraw`."""
        with uninterrupted:
            return self.settle(call.call_id, None, notify=False) is not None

    def expire_call(self, call: PendingCall) -> None:
        """Settles a call whose deadline has passed."""
        error = self._timed_out(call)
        with uninterrupted:
            settled = self.settle(call.call_id, error) is not None
            # The callee's clock for the call has begun later. A call that waits for its turn must
            # not begin in between.
            if settled and call.order is not None:
                self._tell_cancelled(call)

    def expire_unsent(self, call: PendingCall) -> None:
        """Settles a call whose deadline has passed when it got room at last."""
        error = self._no_room(call)
        error.executed = False
        with uninterrupted:
            self.settle(call.call_id, error)

    def expire(self, now: float) -> None:
        """Settles all calls whose deadline is not after ``now``."""
        with self._lock:
            calls = list(self.by_id.values())
            self.earliest = min(
                (call.deadline for call in calls if call.deadline > now), default=NEVER
            )
        _each([call for call in calls if call.deadline <= now], self.expire_call)

    def postpone(self, seconds: float) -> None:
        """Gives all calls this much more time. Threads that wait look at the deadline again."""
        with uninterrupted, self._lock:
            for call in self.by_id.values():
                call.deadline += seconds
            self.earliest += seconds
            self.postponed += seconds

    def abandon(self) -> None:
        """Takes no more calls: in a forked child, since the others are its parent's."""
        self._lock = threading.Lock()  # a thread of the parent may have held the other
        self._closed = True

    def fail(self, error: Callable[[PendingCall], Exception], peer: MemberId | None = None) -> None:
        """Settles all calls to ``peer``, or all calls there are, each with ``error(call)``."""
        calls = [call for call in self.in_flight() if peer in (None, call.peer)]
        _each(calls, lambda call: call.fail(error(call)))
        with uninterrupted, self._lock:  # the peer may be gone: no call to it comes any more
            window = self._windows.get((peer, None)) if peer is not None else None
            if window is not None and not window.used and not window.queue:
                del self._windows[window.peer, None]

    def close(self) -> None:
        """Fails all calls, and from now on those that are entered: this worker has shut down."""
        with uninterrupted, self._lock:
            self._closed = True
        self.fail(lambda _: has_shut_down())

    # -- what is in the table --------------------------------------------------------------

    def get(self, call_id: int) -> PendingCall | None:
        """Returns a call of the table; None if it is not in it, or no longer."""
        return self.by_id.get(call_id)

    def in_flight(self) -> list[PendingCall]:
        """Returns the calls in the table, the oldest first."""
        return list(self.by_id.values())  # atomic under the interpreter's lock

    def oldest(self) -> PendingCall | None:
        """Returns the call of the table that was entered first."""
        try:
            return next(iter(self.by_id.values()), None)
        except RuntimeError:  # another thread has just changed the table
            return next(iter(self.in_flight()), None)

    def loads(self) -> dict[MemberId, list[Load]]:
        """Returns the calls in flight by peer: one entry for each kind of caller."""
        found: dict[MemberId, list[Load]] = {}
        with uninterrupted, self._lock:
            for each in self._windows.values():
                if each.used:
                    load = Load(each.caller is not None, each.used, len(each.queue))
                    found.setdefault(each.peer, []).append(load)
        return found

    def _timed_out(self, call: PendingCall) -> RpcTimeoutError:
        """Returns the error of a call whose deadline has passed."""
        if call.state is _QUEUED:
            return self._no_room(call)
        what = call.title if call.what or call.kind else "a request"
        if call.deadline < call.begun:
            return deadline_passed(f"{what} on {self._callees.describe(call.peer)}", call.timeout)
        explanation = self._callees.explain(call.peer, call.call_id)
        return RpcTimeoutError(
            f"RPC ran for more than set timeout ({call.timeout * 1000:.0f} ms) and will now be "
            f"marked with an error: {what} on {self._callees.describe(call.peer)}{explanation}. "
            f"{call.limit.explanation()}"
        )

    def _no_room(self, call: PendingCall) -> RpcTimeoutError:
        """Returns the error of a call that was not sent in time."""
        return RpcTimeoutError(
            f"the call was not sent within its timeout ({call.timeout * 1000:.0f} ms): calls of "
            f"{self.limit} bytes (max_bytes_in_flight) are in flight to that worker, which is "
            f"slower than its callers{self._callees.explain(call.peer, 0)}"
        )


def _each(calls: Sequence[PendingCall], end: Callable[[PendingCall], None]) -> None:
    """Ends calls, the first one first: all of them, even if what follows one of them fails."""
    with contextlib.ExitStack() as rest:
        for call in reversed(calls):
            rest.callback(end, call)

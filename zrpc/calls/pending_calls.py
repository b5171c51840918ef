"""The calls that wait for an answer: their peers, their deadlines and their outcomes.

No I/O in here. The thread that takes a call out of the table settles it, once: the I/O thread with
an answer, a deadline, or the loss of the peer; or the caller, if its own wait ran out.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Any, Protocol

from zrpc.calls.call_counters import CallCount, Table
from zrpc.calls.function_names import asked_for
from zrpc.errors import RpcCancelledError, RpcError, RpcTimeoutError, WorkerDied
from zrpc.runtime.interrupts import raised_by_handler, uninterrupted
from zrpc.wire.kind import Kind
from zrpc.wire.member_id import MemberId, rank_of
from zrpc.wire.message import Message

if TYPE_CHECKING:
    from zrpc.calls.open_telemetry import CallSpan
    from zrpc.calls.recorder import CallMarks

__all__ = [
    "DEFAULT_LIMIT",
    "NEVER",
    "OWN_LIMIT",
    "Follower",
    "Limit",
    "PendingCall",
    "PendingCalls",
    "Stage",
    "name_of",
    "name_of_function",
]

NEVER = float("inf")

# The outcome of a call that has none yet, shared by all. Thousands of calls may be in flight, so
# each is few objects: the garbage collector goes through all of them whenever many are new.
_NO_OUTCOME: list[Any] = []


# The names of C functions that belong to a module.
_builtin_names: dict[BuiltinFunctionType, str] = {}


def name_of(body: Any) -> str:
    """Returns what to call a request in messages to people: its function's or method's name.

    Not the function itself, which may hold much: a bound method its object, a closure its cells.

    Args:
        body: what is pickled: the function or the method's name first, if there is one.
    """
    what: Any = body[0] if type(body) is tuple and body else ""
    return what if type(what) is str else name_of_function(what)


def name_of_function(function: Any) -> str:
    """Returns what to call a function, or another object that can be called."""
    if type(function) is BuiltinFunctionType:
        return _name_of_builtin(function)
    try:
        name = function.__qualname__
    except Exception as error:  # of an object that can be called
        if raised_by_handler(error):
            raise
        name = None
    return name if type(name) is str else type(function).__qualname__


def _name_of_builtin(function: BuiltinFunctionType) -> str:
    """Returns the name of a C function, such as an operator of torch, which has to make it up."""
    name = _builtin_names.get(function)
    if name is None:
        name = function.__qualname__
        # Not of a method, which would keep its object alive.
        module = sys.modules.get(function.__module__)
        if getattr(module, function.__name__, None) is function:
            _builtin_names[function] = name
    return name


class Follower(Protocol):
    """Follows a call that no thread waits for."""

    def on_settled(self, call: PendingCall) -> None:
        """Learns that the call has an outcome. In the thread that settled it; it must be quick."""


class Limit(Protocol):
    """What has set the timeout of a call."""

    def explanation(self) -> str:
        """Returns what has set it, and how to change that, for error messages."""


class _Setting:
    """A timeout that was set for this call, or for all calls of this worker."""

    def __init__(self, text: str) -> None:
        self._text = text

    def explanation(self) -> str:
        return self._text


OWN_LIMIT = _Setting("This is the timeout of the call itself")
DEFAULT_LIMIT = _Setting(
    "This is the default, the option rpc_timeout: pass a longer timeout, or 0 for no limit"
)


class Stage(IntEnum):
    """How far the message of a call has come at the caller."""

    NEW = 0  # not being sent: it waits for room, or was cancelled before, or could not be sent
    SENDING = 1  # a thread is sending it
    LEFT = 2  # it has left, or waits for the I/O thread to send it


_NEW = Stage.NEW
_ERROR = int(Kind.ERROR)


class PendingCall:
    """One call in flight: a gate that opens when it is settled, and what settled it.

    Args:
        call_id: unique among this worker's calls.
        peer: the member that must answer.
        timeout: seconds; 0 means none.
        holds: anything that must live until the call is settled.
        died: the error if the peer is lost first.

    Attributes:
        begun: when it was made, on the clock of ``time.monotonic``.
        deadline: when it times out, on the same clock; `NEVER` if it does not.
        limit: what has set its timeout.
        kind: the kind of its request, for messages to people.
        what: what is asked for, see `name_of`; also for messages to people.
        gate: opens when there is an outcome.
        follower: told by the thread that settles the call, after the gate has opened.
        siblings: the calls that end with the same handler; see `zrpc.calls.cancel_scope`.
        stage: how far its message has come.
        marks: what is noted of it for a trace; None without one.
        span: its span of OpenTelemetry; None without one.
        undo: undoes what was done for the message, if it is not sent.
        waiters: the idents of the threads that wait for the answer.
    """

    __slots__ = (
        "_calls",
        "_outcome",
        "begun",
        "call_id",
        "deadline",
        "died",
        "follower",
        "gate",
        "holds",
        "kind",
        "limit",
        "marks",
        "peer",
        "siblings",
        "span",
        "stage",
        "undo",
        "waiters",
        "what",
    )

    def __init__(
        self,
        calls: PendingCalls,
        call_id: int,
        peer: MemberId,
        timeout: float,
        holds: Any,
        died: type[WorkerDied],
    ) -> None:
        self._calls = calls
        self._outcome = _NO_OUTCOME
        self.call_id = call_id
        self.peer = peer
        self.begun = time.monotonic()
        self.deadline = self.begun + timeout if timeout else NEVER
        self.holds = holds
        self.died = died
        self.limit: Limit = OWN_LIMIT
        self.kind = 0
        self.what = ""
        self.follower: Follower | None = None
        self.siblings: set[Any] | None = None
        self.stage = Stage.NEW
        self.undo: Callable[[], None] | None = None
        self.marks: CallMarks | None = None
        self.span: CallSpan | None = None
        self.waiters: tuple[int, ...] = ()
        self.gate = threading.Lock()
        self.gate.acquire()

    @property
    def sent(self) -> bool:
        """Whether it is being sent, or has been."""
        return self.stage is not Stage.NEW

    @property
    def left(self) -> bool:
        """Whether its message has left, or waits for the I/O thread to send it."""
        return self.stage is Stage.LEFT

    @property
    def timeout(self) -> float:
        """Its whole time in seconds; 0 means none."""
        return 0.0 if self.deadline == NEVER else self.deadline - self.begun

    @property
    def settled(self) -> bool:
        """Whether there is an outcome, claimed or not."""
        return not self.gate.locked()

    def settle(self, outcome: Any) -> None:
        """Stores the outcome and opens the gate; for the thread that took it from the table."""
        self._outcome = [outcome]
        self.holds = None
        failed = outcome.kind == _ERROR if type(outcome) is Message else outcome is not None
        now = time.monotonic()
        # Before the gate opens: a program that has the answer finds the call counted.
        self._calls.counts[self.what or self.kind].add(now - self.begun, failed)
        if self.marks is not None:
            self.marks.on_settled(self, outcome, failed, now)
        if self.span is not None:
            self.span.on_settled(outcome, failed)
        self.gate.release()
        if self.siblings is not None:
            self.siblings.discard(self)
        self._calls.on_settled(self)
        if self.follower is not None:
            self.follower.on_settled(self)

    def fail(self, error: Exception) -> None:
        """Settles the call with an error, unless it is settled or about to be."""
        with uninterrupted:  # a call that is taken from the table must be settled
            if self._calls.pop(self.call_id) is self:
                self.settle(error)

    def cancel(self) -> bool:
        """Settles the call with an error and has the callee told; False if it is settled."""
        with uninterrupted:
            if self._calls.pop(self.call_id) is not self:
                return False
            self.settle(RpcCancelledError("the call was cancelled by this worker, its caller"))
            # First the outcome, then the check: the sending thread does this the other way round.
            if self.sent:
                self._calls.on_cancelled(self)
            return True

    def take_back(self) -> None:
        """Undoes what was done for the message, once."""
        undo, self.undo = self.undo, None
        if undo is not None:
            undo()

    def undo_too(self, undo: Callable[[], None]) -> None:
        """Adds to what `take_back` calls."""
        self.undo = undo if self.undo is None else partial(_call_both, self.undo, undo)

    def withdraw(self) -> bool:
        """Ends the call without an outcome, if its follower is completed in another way.

        Returns:
            False if it is settled, or about to be.
        """
        with uninterrupted:
            if self._calls.pop(self.call_id) is not self:
                return False
            self.follower = None
            self.settle(None)
            return True

    def remaining(self) -> float:
        """Returns the seconds until its deadline, as `thread_pool.pass_gate` takes them."""
        return -1 if self.deadline == NEVER else max(0.0, self.deadline - time.monotonic())

    def claim(self) -> Any:
        """Returns the outcome to the first thread that asks for it, None to all others."""
        try:
            outcome = self._outcome.pop()  # atomic under the interpreter's lock
        except IndexError:
            return None
        # Now that it is settled, no thread will send it any more. The stage comes first, as that
        # costs an answered call the least.
        if self.stage is _NEW and isinstance(outcome, RpcError):
            outcome.executed = False
        return outcome

    def explanation(self) -> str:
        """Returns what is known about why the peer does not answer, for error messages."""
        return self._calls.explain(self.peer)

    def timed_out(self) -> RpcTimeoutError:
        """The error of a call whose deadline has passed."""
        if (unsent := self._calls.unsent(self)) is not None:
            return unsent
        what = asked_for(self.what, self.kind) if self.what or self.kind else "a request"
        where = self._calls.describe(self.peer)
        return RpcTimeoutError(
            f"RPC ran for more than set timeout ({self.timeout * 1000:.0f} ms) and will now be "
            f"marked with an error: {what} on {where}{self.explanation()}. "
            f"{self.limit.explanation()}"
        )


class PendingCalls:
    """The table of calls in flight. Any thread may call its methods.

    Args:
        on_settled: called with each call when it is settled.
        on_cancelled: called with each call that was cancelled after it was sent.
        explain: what is known about why a peer does not answer, for error messages: text that
            begins with a semicolon, or nothing. Any thread may call it.
        describe: a peer's name and rank, for error messages. Any thread may call it.
        unsent: the error of a call whose deadline passes before it may be sent, else None. Any
            thread may call it.

    Attributes:
        counts: of the calls that are settled.
        earliest: a time before which no call expires, on the clock of ``time.monotonic``.
    """

    def __init__(
        self,
        on_settled: Callable[[PendingCall], None] = lambda _: None,
        on_cancelled: Callable[[PendingCall], None] = lambda _: None,
        explain: Callable[[MemberId], str] = lambda _: "",
        describe: Callable[[MemberId], str] = lambda peer: f"rank {rank_of(peer)}",
        unsent: Callable[[PendingCall], RpcTimeoutError | None] = lambda _: None,
    ) -> None:
        self.on_settled = on_settled
        self.on_cancelled = on_cancelled
        self.explain = explain
        self.describe = describe
        self.unsent = unsent
        self.counts = Table(CallCount)
        # Single operations on the dict are atomic; pop decides which thread settles a call.
        self._calls: dict[int, PendingCall] = {}
        self._ids = itertools.count(1)
        # No call in the table has an earlier deadline than this; the lock guards its changes.
        self.earliest = NEVER
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._calls)

    def new(
        self, peer: MemberId, timeout: float, holds: Any = None, died: type[WorkerDied] = WorkerDied
    ) -> PendingCall:
        """Makes a call that is not entered yet; see `PendingCall` for the arguments."""
        return PendingCall(self, next(self._ids), peer, timeout, holds, died)

    def enter(self, call: PendingCall) -> None:
        """Puts a call into the table."""
        self._calls[call.call_id] = call
        if call.deadline < self.earliest:
            with self._lock:
                self.earliest = min(self.earliest, call.deadline)

    def pop(self, call_id: int) -> PendingCall | None:
        """Takes a call out of the table; returns None if it is not in it, or no longer."""
        return self._calls.pop(call_id, None)

    def get(self, call_id: int) -> PendingCall | None:
        """Returns a call of the table; None if it is not in it, or no longer."""
        return self._calls.get(call_id)

    def in_flight(self) -> list[PendingCall]:
        """Returns the calls in the table, the oldest first."""
        return list(self._calls.values())

    def oldest(self) -> PendingCall | None:
        """Returns the call of the table that was entered first."""
        try:
            return next(iter(self._calls.values()), None)
        except RuntimeError:  # another thread has just changed the table
            return next(iter(self.in_flight()), None)

    def expire(self, now: float) -> None:
        """Settles all calls whose deadline is not after ``now``."""
        # Before the table is read: an entry made meanwhile lowers it again.
        with self._lock:
            self.earliest = NEVER
        calls = list(self._calls.values())
        for call in calls:
            if call.deadline <= now:
                call.fail(call.timed_out())
        rest = [call.deadline for call in calls if call.deadline > now]
        with self._lock:
            self.earliest = min([self.earliest, *rest])

    def postpone(self, seconds: float) -> None:
        """Gives all calls this much more time. Threads that wait look at the deadline again."""
        # Before the table is read, as in `expire`.
        with uninterrupted, self._lock:
            self.earliest = NEVER
        calls = list(self._calls.values())
        for call in calls:
            call.deadline += seconds
        with uninterrupted, self._lock:
            self.earliest = min([self.earliest, *(call.deadline for call in calls)])

    def fail(self, error: Callable[[PendingCall], Exception], peer: MemberId | None = None) -> None:
        """Settles all calls to ``peer``, or all calls there are, each with ``error(call)``."""
        for call in list(self._calls.values()):
            if peer in (None, call.peer):
                call.fail(error(call))


def _call_both(first: Callable[[], None], second: Callable[[], None]) -> None:
    first()
    second()

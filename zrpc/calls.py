"""The calls that wait for an answer: who they wait for, until when, and what came.

No I/O in here. Whoever takes a call out of the table settles it, once: the I/O thread with
an answer, a deadline, or the news that the peer died; or the caller whose own wait ran out.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Hashable
from typing import Any, Protocol

from zrpc.errors import RpcCancelledError, RpcTimeoutError, WorkerDied
from zrpc.pool import acquire

__all__ = ["NEVER", "Follower", "PendingCall", "PendingCalls", "name_of"]

NEVER = float("inf")

# The outcome of a call that has none yet. As many calls may be under way, each has as few objects
# as may be: the garbage collector goes through all there are when there are many new ones.
_NONE: list[Any] = []


def name_of(body: Any) -> object:
    """What to call a request in messages to people: the function, or the method of a value.

    The name, since a function may hold much: a bound method its object, a closure its cells.

    Args:
        body: what is pickled: the function or the method's name first, where there is one.
    """
    what: Any = body[0] if type(body) is tuple and body else ""
    if type(what) is str:
        return what
    try:
        return what.__qualname__
    except Exception:  # of an object that can be called
        return type(what).__qualname__


class Follower(Protocol):
    """What a call is followed by, for which no thread waits."""

    def on_settled(self, call: PendingCall) -> None:
        """The call has an outcome. In the thread that settled it; to be short."""


class PendingCall:
    """One call under way: a gate that opens when it is settled, and what settled it.

    Args:
        calls: the table that it stands in.
        call_id: its number, unique among this worker's calls.
        peer: the rank of the worker that is to answer.
        timeout: seconds; 0 means none.
        holds: anything that has to live until the call is settled.
        died: the error where the peer dies first.
    """

    __slots__ = (
        "_calls",
        "_outcome",
        "begun",
        "call_id",
        "deadline",
        "delayed",
        "died",
        "follower",
        "gate",
        "group",
        "holds",
        "kind",
        "left",
        "peer",
        "received_here",
        "room",
        "sent",
        "timeout",
        "undo",
        "waited_for",
        "what",
    )

    def __init__(
        self,
        calls: PendingCalls,
        call_id: int,
        peer: int,
        timeout: float,
        holds: Any,
        died: type[WorkerDied],
    ) -> None:
        self._calls = calls
        self.call_id = call_id
        self.peer = peer
        self.timeout = timeout
        self.begun = time.monotonic()
        self.deadline = self.begun + timeout if timeout else NEVER
        # What it takes of a window (see there), and of whose; or what waits there for that.
        self.room: tuple[Hashable, Any] | None = None
        # Those that end with the same handler, this one too; see `zrpc.cancel_scope`.
        self.group: set[Any] | None = None
        # Whether it had to wait for room in a window.
        self.delayed = False
        # Undoes what was done for the message, where it is not sent.
        self.undo: Callable[[], None] | None = None
        # Whether it is being sent, or has been.
        self.sent = False
        # Whether its message has left, or waits for the I/O thread to send it.
        self.left = False
        # Whether it is waited for by a thread that may receive the answer itself.
        self.received_here = False
        # Whether a thread waits for the answer.
        self.waited_for = False
        # What is asked for, see `name_of` and Kind; for those who look what this worker does.
        self.what: object = ""
        self.kind = 0
        self.holds = holds
        self.died = died
        # Told by the thread that settles the call, after the gate has opened.
        self.follower: Follower | None = None
        self._outcome = _NONE
        # Opens when there is an outcome.
        self.gate = threading.Lock()
        self.gate.acquire()

    @property
    def settled(self) -> bool:
        """Whether there is an outcome, claimed or not."""
        return not self.gate.locked()

    def is_of(self, calls: PendingCalls) -> bool:
        """Whether it stands, or stood, in that table."""
        return self._calls is calls

    def wait(self) -> None:
        """Waits until the call is settled; it settles the call itself at its deadline.

        Where an exception (Ctrl-C) interrupts it, `waited_for` is false again.
        """
        self.waited_for = True
        try:
            if not acquire(self.gate, self.remaining(), self._receive):
                self.give_up(self.timed_out())
                # Where another thread has taken the call from the table, it settles it at once.
                self.gate.acquire()
            self.gate.release()
        except BaseException:
            self.waited_for = False
            raise

    def _receive(self) -> None:
        self._calls.receive(self)

    def settle(self, outcome: Any) -> None:
        """Stores the outcome and opens the gate; only for whoever took it from the table."""
        self._outcome = [outcome]
        self.holds = None
        self.gate.release()
        if self.group is not None:
            self.group.discard(self)
        if self.room is not None:
            self._calls.on_leave(self)
        if self.follower is not None:
            self.follower.on_settled(self)

    def give_up(self, error: Exception) -> None:
        """Settles the call with an error, where nothing else has done so."""
        if self._calls.pop(self.call_id) is self:
            self.settle(error)

    def cancel(self) -> bool:
        """Settles the call with an error, and has the callee told; False where it is settled."""
        if self._calls.pop(self.call_id) is not self:
            return False
        self.settle(RpcCancelledError("the call was cancelled by this worker, its caller"))
        # First the end, then the look: whoever sends it does this the other way round.
        if self.sent:
            self._calls.on_cancel(self)
        return True

    def take_back(self) -> None:
        """Undoes what was done for the message, once."""
        undo, self.undo = self.undo, None
        if undo is not None:
            undo()

    def withdraw(self) -> bool:
        """Ends the call without an outcome, for whoever completes its follower in another way.

        Returns:
            False where it is settled, or just about to be.
        """
        if self._calls.pop(self.call_id) is not self:
            return False
        self.follower = None
        self.settle(None)
        return True

    def remaining(self) -> float:
        """The seconds until its deadline, for `zrpc.pool.acquire`."""
        return -1 if self.deadline == NEVER else max(0.0, self.deadline - time.monotonic())

    def claim(self) -> Any:
        """The outcome for the first that asks for it, None for all others."""
        try:
            return self._outcome.pop()  # atomic under the interpreter's lock
        except IndexError:
            return None

    def explanation(self) -> str:
        """What is known about why the peer does not answer, for error messages."""
        return self._calls.explain(self.peer)

    def timed_out(self) -> RpcTimeoutError:
        """The error of a call whose deadline has passed."""
        return RpcTimeoutError(
            f"RPC ran for more than set timeout ({self.timeout * 1000:.0f} ms) and will now be "
            f"marked with an error{self.explanation()}"
        )


class PendingCalls:
    """The table of calls under way. All methods may be called from any thread.

    Args:
        receive: called by the thread that waits for a call; it may receive the answer itself,
            take the call from the table and settle it.
        on_leave: called with each call that had room in a window, when it is settled.
        on_cancel: called with each call that was cancelled after it was sent.

    Attributes:
        explain: what is known about why a peer does not answer, for error messages: text that
            begins with a semicolon, or nothing. Any thread may call it.
        earliest: a time before which no call expires, on the clock of ``time.monotonic``.
    """

    def __init__(
        self,
        receive: Callable[[PendingCall], None] = lambda _: None,
        on_leave: Callable[[PendingCall], None] = lambda _: None,
        on_cancel: Callable[[PendingCall], None] = lambda _: None,
    ) -> None:
        self.receive = receive
        self.on_leave = on_leave
        self.explain: Callable[[int], str] = lambda _: ""
        self.on_cancel = on_cancel
        # Single operations on the dict are atomic; pop decides who settles a call.
        self._calls: dict[int, PendingCall] = {}
        self._ids = itertools.count(1)
        # No call in the table has an earlier deadline than this; the lock guards its changes.
        self.earliest = NEVER
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._calls)

    def ids(self) -> list[int]:
        """The numbers of the calls under way."""
        return list(self._calls)

    def add(
        self,
        peer: int,
        timeout: float,
        holds: Any = None,
        died: type[WorkerDied] = WorkerDied,
    ) -> PendingCall:
        """Makes a call and enters it; see `PendingCall` for the arguments."""
        call = self.new(peer, timeout, holds, died)
        self.enter(call)
        return call

    def new(
        self, peer: int, timeout: float, holds: Any = None, died: type[WorkerDied] = WorkerDied
    ) -> PendingCall:
        """Makes a call that is still to be entered."""
        return PendingCall(self, next(self._ids), peer, timeout, holds, died)

    def enter(self, call: PendingCall) -> None:
        """Puts a call into the table."""
        self._calls[call.call_id] = call
        if call.deadline < self.earliest:
            with self._lock:
                self.earliest = min(self.earliest, call.deadline)

    def pop(self, call_id: int) -> PendingCall | None:
        """Takes a call out; None where it is not there (any more)."""
        return self._calls.pop(call_id, None)

    def get(self, call_id: int) -> PendingCall | None:
        """A call of the table; None where it is not there (any more)."""
        return self._calls.get(call_id)

    def under_way(self) -> list[PendingCall]:
        """The calls in the table, the oldest first."""
        return list(self._calls.values())

    def oldest(self) -> PendingCall | None:
        """The call that was entered first, of those in the table."""
        try:
            return next(iter(self._calls.values()), None)
        except RuntimeError:  # another thread has just changed the table
            return next(iter(self.under_way()), None)

    def expire(self, now: float) -> None:
        """Settles all calls whose deadline is not after ``now``."""
        # Before the look at the table: an entry made meanwhile lowers it again.
        with self._lock:
            self.earliest = NEVER
        calls = list(self._calls.values())
        for call in calls:
            if call.deadline <= now and self.pop(call.call_id) is call:
                call.settle(call.timed_out())
        rest = [call.deadline for call in calls if call.deadline > now]
        with self._lock:
            self.earliest = min([self.earliest, *rest])

    def fail(self, error: Callable[[PendingCall], Exception], peer: int | None = None) -> None:
        """Settles all calls to ``peer``, or all calls there are, each with ``error(call)``."""
        for call in list(self._calls.values()):
            if peer in (None, call.peer) and self.pop(call.call_id) is call:
                call.settle(error(call))

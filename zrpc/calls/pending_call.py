"""One call in flight, at its caller. No I/O in here."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from enum import IntEnum
from time import monotonic
from typing import Any, Protocol

from zrpc.calls.function_names import asked_for
from zrpc.calls.taking import Taking
from zrpc.errors import WorkerDied
from zrpc.runtime.interrupts import uninterrupted
from zrpc.wire.member_id import MemberId

__all__ = [
    "DEFAULT_LIMIT",
    "NEVER",
    "OWN_LIMIT",
    "Follower",
    "Limit",
    "PendingCall",
    "Room",
    "State",
    "Window",
]

NEVER = float("inf")

# The outcome of a call that has none yet, shared by all. Thousands of calls may be in flight, so
# each is few objects: the garbage collector goes through all of them whenever many are new.
_NO_OUTCOME: list[Any] = []


class Follower(Protocol):
    """Follows a call that no thread waits for."""

    def on_settled(self, call: PendingCall) -> bool | None:
        """Learns that the call has an outcome. In the thread that settled it; it must be quick.

        Returns:
            Whether what follows is left to the threads that wait for the call.
        """


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


OWN_LIMIT: Limit = _Setting("This is the timeout of the call itself")
DEFAULT_LIMIT: Limit = _Setting(
    "This is the default, the option rpc_timeout: pass a longer timeout, or 0 for no limit"
)


class Parent(Protocol):
    """The handler that has made a call; see `zrpc.calls.cancel_scope`."""

    def adopt(self, child: PendingCall) -> bool: ...

    def release(self, child: PendingCall) -> None: ...


class State(IntEnum):
    """How far a call has come at its caller. Changes under the lock of its table."""

    NEW = 0  # not in the table yet
    QUEUED = 1  # waits for room, see `zrpc.calls.pending_calls`
    SENDING = 2  # a thread sends it, or has sent it
    UNSENT = 3  # settled before it could be sent
    SETTLED = 4  # settled after that


class Table(Protocol):
    """The table that the call is entered into; see `zrpc.calls.pending_calls`."""

    ids: Iterator[int]

    def settle(self, call_id: int, outcome: Any, notify: bool = True) -> PendingCall | None: ...

    def cancel(self, call: PendingCall) -> bool: ...

    def withdraw(self, call: PendingCall) -> bool: ...

    def expire_call(self, call: PendingCall) -> None: ...


class Window:
    """The bytes in flight to one peer, of callers of one kind; guarded by the table's lock."""

    __slots__ = ("caller", "peer", "queue", "used")

    def __init__(self, peer: MemberId, caller: Hashable) -> None:
        self.peer = peer
        self.caller = caller
        self.used = 0
        self.queue: deque[PendingCall] = deque()


class Room:
    """The wait of a call for room.

    Attributes:
        gate: opens when there is room, or when the call is settled.
        go: called then, once. It must be quick, and settle no call.
        thread: the ident of the thread that waits; 0 if none does.
    """

    __slots__ = ("gate", "go", "thread")

    def __init__(self) -> None:
        self.gate = threading.Lock()
        self.gate.acquire()
        self.go: Callable[[], None] = self.gate.release
        self.thread = 0


class PendingCall:
    """One call in flight: a gate that opens when it is settled, and what settled it.

    Args:
        calls: its table.
        peer: the member that must answer.
        timeout: seconds; 0 means none. Below 0, its deadline has passed.

    Attributes:
        call_id: its number, unique among this worker's calls.
        begun: when it was made, on the clock of ``time.monotonic``.
        deadline: when it times out, on the same clock; `NEVER` if it does not.
        limit: what has set its timeout.
        kind: the kind of its request, for messages to people.
        what: what is asked for, see `name_of`; also for messages to people.
        whose: for messages, the name of the actor that is called, or nothing.
        state: how far it has come.
        left: whether its message has left, or waits for the I/O thread to send it.
        gate: opens when there is an outcome.
        holds: anything that must live until the call is settled.
        died: makes the error if the peer is lost first.
        order: puts it into the table; None for most calls.
        follower: told by the thread that settles the call, after the gate has opened.
        parent: the scope of the handler that makes the call, which it ends with.
        observation: its `CallObservation`; None if nobody looks.
        undo: undoes what was done for the message, if it is not sent.
        outcome: a list with its outcome, until that is claimed.
        waiters: the idents of the threads that wait for the answer.
        taking: whether the value was taken, if tasks of asyncio await it, or its owner asks.
        window, size: whose bytes it is counted with, and how many.
        room: its wait for room, while it is queued.
    """

    # Defaults on the class: a call is made for each request, and few need more than `__init__`.
    deadline = NEVER
    limit = OWN_LIMIT
    kind = 0
    what = ""
    whose = ""
    state = State.NEW
    left = False
    holds: Any = None
    died: Callable[[str], WorkerDied] = WorkerDied
    order: Any = None
    follower: Follower | None = None
    parent: Parent | None = None
    observation: Any = None
    undo: Callable[[], None] | None = None
    waiters: tuple[int, ...] = ()
    taking: Taking | None = None
    window: Window | None = None
    size = 0
    room: Room | None = None
    outcome = _NO_OUTCOME

    def __init__(self, calls: Table, peer: MemberId, timeout: float) -> None:
        self._calls = calls
        self.call_id = next(calls.ids)
        self.peer = peer
        self.begun = monotonic()
        if timeout:
            self.deadline = self.begun + timeout
        self.gate = threading.Lock()
        self.gate.acquire()

    @property
    def title(self) -> str:
        """What it is called in messages to people."""
        return f"{asked_for(self.what, self.kind)}{self.whose}"

    @property
    def timeout(self) -> float:
        """Its whole time in seconds; 0 means none."""
        return 0.0 if self.deadline == NEVER else self.deadline - self.begun

    @property
    def settled(self) -> bool:
        """Whether there is an outcome, claimed or not."""
        return not self.gate.locked()

    def remaining(self) -> float:
        """Returns the seconds until its deadline, as `thread_pool.pass_gate` takes them."""
        return -1 if self.deadline == NEVER else max(0.0, self.deadline - monotonic())

    def claim(self) -> Any:
        """Returns the outcome to the first thread that asks for it, None to all others."""
        try:
            return self.outcome.pop()  # atomic under the interpreter's lock
        except IndexError:
            return None

    def fail(self, error: Exception) -> None:
        """Settles the call with an error, unless it is settled or about to be."""
        with uninterrupted:
            self._calls.settle(self.call_id, error)

    def expire(self) -> None:
        """Settles the call, whose deadline has passed, as `fail`."""
        self._calls.expire_call(self)

    def cancel(self) -> bool:
        """Settles the call with an error and has the callee told; False if it is settled."""
        return self._calls.cancel(self)

    def withdraw(self) -> bool:
        """Ends the call without an outcome, if its follower is completed in another way.

        Returns:
            False if it is settled, or about to be.
        """
        return self._calls.withdraw(self)

    def take_back(self) -> None:
        """Undoes what was done for the message, once."""
        undo, self.undo = self.undo, None
        if undo is not None:
            undo()

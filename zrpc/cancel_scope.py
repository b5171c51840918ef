"""What a handler's work belongs to: who waits for it, until when, and whether still.

A `CancelScope` comes to be with a request and is current, by a context variable, where its
handler runs: in a thread of the pool, in a coroutine, in the callbacks that either adds. Calls that
are made there are the scope's children: they take no longer than it has left, and end with it.

(The word is that of anyio and trio.)
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from zrpc.pool import acquire

if TYPE_CHECKING:
    from zrpc.worker_info import WorkerInfo

__all__ = ["CancelScope", "activate", "current_scope", "deactivate"]

NEVER = float("inf")

# What a nested call has at least, in seconds: 0 would mean no limit.
_LEAST = 0.001

# Guards, of all scopes, what is done once and rarely: the first child, the first wait, the end.
# Held for a few instructions, and no other lock is taken under it.
_lock = threading.Lock()


class Child(Protocol):
    """A call that a handler waits for, or has begun; see `zrpc.calls.PendingCall`."""

    group: Any
    sent: bool

    @property
    def settled(self) -> bool:
        """Whether there is an outcome."""

    def cancel(self) -> bool:
        """Ends it."""


class CancelScope:
    """The scope of one request's handler. All methods may be called from any thread.

    Args:
        caller: who sent the request.
        timeout: seconds that the caller still waits from now on; 0 for no limit.
        lasting: whether the handler runs in any case, since others than the caller may wait for
            what it makes.

    Attributes:
        deadline: when the caller stops waiting, on the clock of ``time.monotonic``.
        begun: whether the handler has begun.
        cancelled: whether nobody waits any more; its answer is not sent.
        returned: whether the handler has returned, and its outcome is to come by a future.
    """

    # One is made for each call, and most never need more than the first two of these.
    deadline = NEVER
    begun = False
    cancelled = False
    returned = False
    lasting = False
    _task: Any = None
    _children: set[Child] | None = None
    # Opens with the end; made where somebody waits for that.
    _gate: threading.Lock | None = None

    def __init__(self, caller: WorkerInfo, timeout: float, lasting: bool = False) -> None:
        self.caller = caller
        if timeout:
            self.deadline = monotonic() + timeout
        if lasting:
            self.lasting = True

    def begin(self) -> bool:
        """The handler is about to run; False where it is not to."""
        # First the note, then the look: `cancel` does this the other way round, so that at least
        # one of the two sees the other.
        self.begun = True
        if not self.cancelled and (monotonic() < self.deadline or self.lasting):
            return True
        self.cancelled = True
        return False

    @property
    def over(self) -> bool:
        """Whether nobody waits any more, as far as is known here."""
        return self.cancelled or (self.deadline <= monotonic() and not self.lasting)

    def cancel(self) -> bool:
        """Nobody waits any more: ends what can be ended.

        Returns:
            Whether the handler has not begun, and never will.
        """
        with _lock:
            if self.cancelled or self.lasting:
                return False
            self.cancelled = True
            if self._gate is not None:
                self._gate.release()
            # First those that wait for room, which the others' ends would give them.
            children = sorted(self._children or (), key=lambda child: child.sent)
        if not self.begun:
            return True
        if (task := self._task) is not None:
            # Before the children, whose ends would else come to the coroutine first.
            with contextlib.suppress(RuntimeError):  # its loop is closed
                task.get_loop().call_soon_threadsafe(task.cancel)
        for child in children:
            child.cancel()
        return False

    def adopt(self, child: Child) -> None:
        """A call of the handler's begins; it ends at once where the scope has ended."""
        children = self._children
        if children is None:
            with _lock:
                if self._children is None:
                    self._children = set()
                children = self._children
        # In this order: whoever settles the child takes it out afterwards.
        child.group = children
        children.add(child)
        if child.settled:
            children.discard(child)
        if self.cancelled:
            child.cancel()

    def follow(self, task: Any) -> bool:
        """The handler goes on in an asyncio task, the current one; False where it is not to."""
        self._task = task
        return not self.cancelled

    def remaining(self) -> float | None:
        """The seconds until the deadline, 0 after it; None where there is none."""
        return None if self.deadline == NEVER else max(0.0, self.deadline - monotonic())

    def bounded(self, timeout: float) -> float:
        """The timeout of a nested call that is to have ``timeout`` seconds; 0 for no limit."""
        if self.deadline == NEVER:
            return timeout
        remaining = max(_LEAST, self.deadline - monotonic())
        return min(timeout or remaining, remaining)

    def wait(self, timeout: float | None) -> bool:
        """Waits for the end, so many seconds at most; returns `over`."""
        with _lock:
            if self.cancelled:
                return True
            if self._gate is None:
                self._gate = threading.Lock()
                self._gate.acquire()
            gate = self._gate
        limits = [] if timeout is None else [max(0.0, timeout)]
        remaining = None if self.lasting else self.remaining()
        if remaining is not None:
            limits.append(remaining)
        if acquire(gate, min([*limits, threading.TIMEOUT_MAX]) if limits else -1):
            gate.release()  # for others that wait
        return self.over


# None inside of a shield.
_current: contextvars.ContextVar[CancelScope | None] = contextvars.ContextVar(
    "zrpc_cancel_scope", default=None
)

# The scope in which this code runs; None outside of handlers, and inside of a shield.
current_scope = _current.get
# Makes a scope (or none) current, in this context; and what was before, by what that returned.
activate = _current.set
deactivate = _current.reset

"""The cancel scope of a handler: its caller, the deadline, and whether the caller still waits.

A `CancelScope` is made with a request. A context variable makes it current in the request's
handler: in a thread of the pool, in a coroutine, and in the callbacks that either adds. Calls made
there are the scope's children: they get no later deadline than the scope, and end with it.

(The term is from anyio and trio.)
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import weakref
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any

from zrpc.calls.function_names import name_of_function
from zrpc.calls.pending_call import NEVER, PendingCall
from zrpc.errors import RpcCancelledError, RpcTimeoutError
from zrpc.runtime.forks import free_in_child
from zrpc.runtime.thread_pool import pass_gate

if TYPE_CHECKING:
    from zrpc.membership.worker_info import WorkerInfo

# The shortest timeout of a nested call: 0 would mean no limit.
_MIN_TIMEOUT_SECONDS = 0.001

# Guards the children of all scopes, the first wait, and the cancellation. Held for a few
# instructions; no other lock is taken while it is held. That of a table of calls may be held.
_lock = free_in_child(threading.Lock())


class CancelScope:
    """The scope of one request's handler. Any thread may call its methods.

    Args:
        caller: the worker that sent the request.
        timeout: seconds that the caller waits from now on; 0 for no limit.
        must_run: whether the handler runs even if the caller no longer waits, since other workers
            may wait for the value that it makes.

    Attributes:
        deadline: when the caller stops waiting, on the clock of ``time.monotonic``.
        arrived: when the request arrived, on the same clock.
        begun: whether the handler has begun.
        started: when it has, on the same clock; 0 before that, and once it is counted.
        cancelled: whether the caller no longer waits; then no answer is sent.
        deferred: whether the handler has returned a future, which the outcome comes from.
        outcome_from: what it comes from, for people.
        returned: refers to that future, if a function has returned one.
        call_id: the caller's number of the call.
        thread: the ident of the thread that the handler began in; 0 before that.
        function: the function that the caller asked for, once it is unpickled.
        in_task: whether the handler is a coroutine that has begun.
        task: the asyncio task that it goes on in; None if it isn't one, or has ended.
        hops: of the request; see `zrpc.calls.last_calls`.
        mailbox: of the actor that it calls; None if it calls none.
        in_steps: whether the handler is a generator, which may run in one thread after another.
        rests: whether that generator holds no thread, until its items are read.
        closes: whether an async generator is closed: nothing cancels what its ``finally`` awaits.
        early: the values of RRefs that were made in a constructor of an actor, perhaps to itself.
        batch: the request of the batch that runs for this call and others; else None. It has the
            caller and the number of the first of them.
    """

    # Defaults on the class: a scope is made for each call, and few need more than the first two.
    deadline = NEVER
    begun = False
    cancelled = False
    deferred = False
    outcome_from = "the future that its function has returned"
    returned: weakref.ref[Any] | None = None
    must_run = False
    thread = 0
    call_id = 0
    started = 0.0
    function: Any = None
    in_task = False
    task: Any = None
    hops = 0
    mailbox: Any = None
    in_steps = False
    rests = False
    closes = False
    early: tuple[Any, ...] = ()
    batch: Any = None
    _children: set[PendingCall] | None = None
    _on_cancel: Callable[[], object] | None = None
    # Opens when the scope is cancelled; made by the first wait.
    _gate: threading.Lock | None = None

    def __init__(self, caller: WorkerInfo, timeout: float, must_run: bool = False) -> None:
        self.caller = caller
        self.arrived = monotonic()
        if timeout:
            self.deadline = self.arrived + timeout
        if must_run:
            self.must_run = True

    def begin(self) -> bool:
        """Marks the handler as begun; returns False if it must not run."""
        # Sets `begun` first and reads `cancelled` afterwards; `cancel` does the reverse. So at
        # least one of the two sees the other.
        self.begun = True
        self.thread = threading.get_ident()
        now = monotonic()
        if not self.cancelled and (now < self.deadline or self.must_run):
            self.started = now
            return True
        self.cancelled = True
        return False

    @property
    def abandoned(self) -> bool:
        """Whether the caller no longer waits, as far as this worker knows."""
        return self.cancelled or (self.deadline <= monotonic() and not self.must_run)

    def cancel(self) -> bool:
        """Cancels what can be cancelled, because the caller no longer waits.

        Returns:
            Whether the handler has not begun, and never will.
        """
        with _lock:
            if self.cancelled or self.must_run:
                return False
            self.cancelled = True
            if self._gate is not None:
                self._gate.release()
            # First the calls that wait for room: ending the others would give them room.
            children = sorted(self._children or (), key=lambda child: child.state)
        if (leave := self._on_cancel) is not None:
            leave()
        if not self.begun:
            return True
        if (task := self.task) is not None:
            # Before the children: else the coroutine would see their errors first.
            with contextlib.suppress(RuntimeError):  # its loop is closed
                task.get_loop().call_soon_threadsafe(self._cancel_task)
        for child in children:
            child.cancel()
        return False

    def _cancel_task(self) -> None:
        """Cancels the task, in its loop; not if its generator rests: that is closed instead."""
        if (task := self.task) is not None and not (self.rests or self.closes):
            task.cancel()

    def when_cancelled(self, leave: Callable[[], object]) -> None:
        """Calls ``leave()`` if the scope is cancelled, or has been; it may be called twice.

        Mostly in the I/O thread, so it must be quick. There is one at most; a later one replaces
        it.
        """
        # Sets it first and reads `cancelled` afterwards; `cancel` does the reverse.
        self._on_cancel = leave
        if self.cancelled:
            leave()

    def adopt(self, child: PendingCall) -> bool:
        """Adds a call of the handler; returns False if the scope is cancelled."""
        with _lock:
            if self._children is None:
                self._children = set()
            self._children.add(child)
            return not self.cancelled

    def release(self, child: PendingCall) -> None:
        """Removes a call of the handler, which is settled."""
        if self._children is not None:
            self._children.discard(child)

    def children(self) -> list[PendingCall]:
        """Returns the calls of the handler that are in flight."""
        return list(self._children or ())  # atomic under the interpreter's lock

    def follow(self, task: Any) -> bool:
        """Notes the asyncio task that the handler goes on in; returns False if it must not."""
        self.task = task
        self.in_task = True
        return not self.cancelled

    def remaining(self) -> float | None:
        """Returns the seconds until the deadline, 0 after it; None without a deadline."""
        return None if self.deadline == NEVER else max(0.0, self.deadline - monotonic())

    def bounded(self, timeout: float) -> float:
        """Returns ``timeout``, cut to the deadline, for a nested call; 0 means no limit."""
        if self.deadline == NEVER:
            return timeout
        remaining = max(_MIN_TIMEOUT_SECONDS, self.deadline - monotonic())
        return min(timeout or remaining, remaining)

    def explanation(self) -> str:
        """Returns why a nested call has its timeout, for error messages."""
        what = name_of_function(self.function) if self.function is not None else "a call"
        return (
            f"This is what was left of the time for the call being handled, {what} from "
            f"{self.caller.name} (rank {self.caller.rank}): give that one a longer timeout, or 0 "
            "for no limit"
        )

    def has_caused(self, error: BaseException) -> bool:
        """Returns whether a handler that was cancelled may have failed of that."""
        if isinstance(error, RpcTimeoutError):  # of a nested call, at the deadline of both
            return self.explanation() in str(error)
        return isinstance(error, (RpcCancelledError, asyncio.CancelledError))

    def wait(self, timeout: float | None) -> bool:
        """Waits up to ``timeout`` seconds for the cancellation; returns `abandoned`."""
        with _lock:
            if self.cancelled:
                return True
            if self._gate is None:
                self._gate = threading.Lock()
                self._gate.acquire()
            gate = self._gate
        limits = [] if timeout is None else [max(0.0, timeout)]
        remaining = None if self.must_run else self.remaining()
        if remaining is not None:
            limits.append(remaining)
        pass_gate(gate, min([*limits, threading.TIMEOUT_MAX]) if limits else -1)
        return self.abandoned


# None outside of handlers, and inside of a shield.
_current: contextvars.ContextVar[CancelScope | None] = contextvars.ContextVar(
    "zrpc_cancel_scope", default=None
)

# Returns the scope that this code runs in, or None.
current_scope = _current.get
# `activate` makes a scope (or None) current in this context; `deactivate` takes the token that it
# returned, and restores the previous one.
activate = _current.set
deactivate = _current.reset

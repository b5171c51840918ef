"""What a stream takes its items from, and how its reader waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any

from zrpc.agent.agent import Agent
from zrpc.calls.cancel_scope import current_scope
from zrpc.calls.pending_call import PendingCall
from zrpc.runtime.event_loop import running_loop
from zrpc.runtime.interrupts import UninterruptedLock
from zrpc.runtime.thread_pool import current_pool, pass_gate

# How long a task may read before others of its event loop have a turn, or twice that.
_TURN_SECONDS = 0.01


class Source(ABC):
    """The items of one or of several generators. Any thread may call its methods.

    The time limit of an item runs only while a reader waits. So the source counts for how long
    readers have waited, and each consumer knows how much that was when it last gave an item.

    Args:
        agent: this worker's.
        timeout: the longest wait for an item of a generator, in seconds; 0 means no limit.

    Attributes:
        items: those that can be taken at once, without a lock.
        used_at: when the program last asked for more, on the clock of ``time.monotonic``.
        read_by: by whom; see `present_reader`.
        is_local: whether this worker itself makes items, or some of them.
    """

    is_local = False
    # When a task that reads without a pause lets others of its loop run.
    turn_at = 0.0
    _turn_is_due = False

    def __init__(self, agent: Agent, timeout: float) -> None:
        self._agent = agent
        self._calls = agent.caller.calls
        self._timeout = timeout
        self.items: deque[Any] = deque()
        self.used_at = monotonic()
        self.read_by = present_reader()
        # What wakes those who wait. One is appended before it is looked whether there are items,
        # and they are taken after there may be some.
        self._wakers: deque[Callable[[], object]] = deque()
        # Guards what follows, and what subclasses say; no other lock is taken while it is held.
        self._lock = UninterruptedLock()
        self._waits: set[Callable[[], object]] = set()  # the wakers of those who wait
        self._waited_before = self._waits_since = 0.0

    @property
    @abstractmethod
    def title(self) -> str:
        """What it is called in messages to people."""

    @abstractmethod
    def opened(self) -> Sequence[Any]:
        """Returns the consumers (see `Consumer`) that are not read to their ends."""

    @abstractmethod
    def has_items(self) -> bool:
        """Returns whether there are items; makes those ready that have arrived.

        Raises:
            StopIteration: there are none left.
            Exception: what has ended the stream.
        """

    @abstractmethod
    def is_ready(self) -> bool:
        """Returns whether `has_items` may find something now."""

    @abstractmethod
    def close(self) -> None:
        """Ends it at once."""

    @property
    def calls(self) -> list[PendingCall]:
        """The calls of these generators."""
        return [consumer.call for consumer in self.opened()]

    @property
    def is_awaited(self) -> bool:
        """Whether a thread or a task waits for an item."""
        return bool(self._waits)

    # -- in the thread, or the task, that wants items ----------------------------------------

    def fill(self) -> None:
        """Waits until there are items, in this thread.

        Raises:
            RpcTimeoutError: it took longer than the timeout; the stream is closed.
            Exception: see `has_items`.
        """
        self._begin()
        while not self.has_items():
            gate = threading.Lock()
            gate.acquire()
            try:
                if self._will_wake(gate.release):
                    self._wait(gate, self._time_left())
            finally:
                self._forget_waker(gate.release)

    async def give_turn(self) -> None:
        """Lets the other tasks of this event loop run, if they have not since the last time.

        The reader of a quick stream need never wait for an item. Call it at the time ``turn_at``.
        """
        self.turn_at = monotonic() + _TURN_SECONDS
        if self._turn_is_due:
            await asyncio.sleep(0)
        else:
            self._turn_is_due = True
            asyncio.get_running_loop().call_soon(self._on_turn)

    def _on_turn(self) -> None:
        self._turn_is_due = False

    async def fill_async(self) -> None:
        """Waits until there are items, in a task of any event loop; raises what `fill` does.

        Raises:
            StopAsyncIteration: there are none left.
        """
        loop = asyncio.get_running_loop()
        self._begin()
        try:
            while not self.has_items():
                woken = loop.create_future()
                waker = partial(complete_in_loop, loop, woken)
                try:
                    if self._will_wake(waker):
                        await asyncio.wait([woken], timeout=self._time_left())
                finally:
                    self._forget_waker(waker)
        except StopIteration:
            raise StopAsyncIteration from None

    def _begin(self) -> None:
        """Notes that a reader wants an item."""
        self.used_at, self.read_by = monotonic(), present_reader()

    def _will_wake(self, waker: Callable[[], object]) -> bool:
        """Calls a waker when there may be items; returns False if there may be some now."""
        now = monotonic() - self._calls.postponed
        with self._lock:
            if not self._waits:
                self._waits_since = now
            self._waits.add(waker)
            self._wakers.append(waker)
        return not self.is_ready()

    def _forget_waker(self, waker: Callable[[], object]) -> None:
        """Forgets one whose reader no longer waits."""
        self.used_at = monotonic()
        with self._lock, contextlib.suppress(ValueError):  # it was called
            if self._waits:
                self._waits.discard(waker)
                if not self._waits:
                    self._waited_before += self.used_at - self._calls.postponed - self._waits_since
            self._wakers.remove(waker)

    def _wait(self, gate: threading.Lock, seconds: float | None) -> None:
        # What `zrpc stacks` shows is read from this frame.
        receives = current_pool() is None and not self.is_local
        receive = self._agent.receiver.receive if receives else None
        pass_gate(gate, -1 if seconds is None else seconds, receive)

    def wake(self) -> None:
        """Wakes all that wait. In any thread, also the one that receives."""
        while self._wakers:
            try:
                self._wakers.popleft()()
            except IndexError:  # another thread has taken it
                return

    # -- the time that readers wait ----------------------------------------------------------

    def waited(self) -> float:
        """Returns for how long readers have waited, in seconds."""
        if not self._waits:
            return self._waited_before
        return self._waited_before + monotonic() - self._calls.postponed - self._waits_since

    def _time_left(self) -> float | None:
        """Ends the streams that have let the reader wait too long; returns when the next is due."""
        if not self._timeout:
            return None
        now, first = self.waited(), self._timeout
        for consumer in self.opened():
            left = consumer.asked + self._timeout - now
            if left <= 0:
                consumer.close(consumer.timed_out())
            else:
                first = min(first, left)
        return first


def present_reader() -> Any:
    """Returns what runs here: the scope of a handler, a weak reference to a task, or a thread."""
    if (scope := current_scope()) is not None:
        return scope
    task = None if running_loop() is None else asyncio.current_task()
    return threading.get_ident() if task is None else weakref.ref(task)


def complete_in_loop(
    loop: asyncio.AbstractEventLoop,
    future: asyncio.Future[None],
    error: BaseException | None = None,
) -> None:
    """Completes a future of a loop's, in any thread."""

    def complete() -> None:
        if not future.done():
            future.set_result(None) if error is None else future.set_exception(error)

    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(complete)

"""What a stream takes its items from, and how its reader waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from zrpc.calls.cancel_scope import current_scope
from zrpc.runtime.event_loop import running_loop


class Source(ABC):
    """The items of one or of several generators. Any thread may call its methods.

    Attributes:
        items: those that can be taken at once, without a lock.
        used_at: when the program last asked for more, on the clock of ``time.monotonic``.
        read_by: by whom; see `present_reader`.
    """

    items: deque[Any]
    used_at: float
    read_by: Any

    @property
    @abstractmethod
    def name(self) -> str:
        """What the program called."""

    @property
    @abstractmethod
    def where(self) -> str:
        """Which worker runs it, or how many do."""

    @property
    @abstractmethod
    def is_awaited(self) -> bool:
        """Whether a thread or a task waits for an item."""

    @abstractmethod
    def has_items(self) -> bool:
        """Returns whether there are items; makes those ready that have arrived.

        Raises:
            StopIteration: there are none left.
            Exception: what has ended the stream.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends it at once."""

    def fill(self) -> None:
        """Waits until there are items, in this thread.

        Raises:
            RpcTimeoutError: it took longer than the timeout; the stream is closed.
            Exception: see `has_items`.
        """
        left = self._countdown()
        while not self.has_items():
            gate = threading.Lock()
            gate.acquire()
            try:
                if self._will_wake(gate.release):
                    self._wait(gate, left())
            finally:
                self._forget_waker(gate.release)

    async def fill_async(self) -> None:
        """Waits until there are items, in a task of any event loop; raises what `fill` does.

        Raises:
            StopAsyncIteration: there are none left.
        """
        loop, left = asyncio.get_running_loop(), self._countdown()
        try:
            while not self.has_items():
                woken = loop.create_future()
                waker = partial(_wake, loop, woken)
                try:
                    if self._will_wake(waker):
                        await asyncio.wait([woken], timeout=left())
                finally:
                    self._forget_waker(waker)
        except StopIteration:
            raise StopAsyncIteration from None

    @abstractmethod
    def _countdown(self) -> Callable[[], float | None]:
        """Returns a function that returns for how many seconds to wait, None without a limit."""

    @abstractmethod
    def _will_wake(self, waker: Callable[[], object]) -> bool:
        """Calls a waker when there may be items; returns False if there may be some now."""

    @abstractmethod
    def _forget_waker(self, waker: Callable[[], object]) -> None:
        """Forgets one that was not called, since its reader no longer waits."""

    @abstractmethod
    def _wait(self, gate: threading.Lock, seconds: float | None) -> None:
        """Waits at a gate, in this thread."""


def present_reader() -> Any:
    """Returns what runs here: the scope of a handler, a weak reference to a task, or a thread."""
    if (scope := current_scope()) is not None:
        return scope
    task = None if running_loop() is None else asyncio.current_task()
    return threading.get_ident() if task is None else weakref.ref(task)


def _wake(loop: asyncio.AbstractEventLoop, woken: asyncio.Future[None]) -> None:
    """Wakes a task that awaits a future of its loop's, in any thread."""

    def arrive() -> None:
        if not woken.done():
            woken.set_result(None)

    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(arrive)

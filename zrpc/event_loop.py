"""The thread that runs the ``async def`` handlers of one worker."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from zrpc.context_thread import ContextThread

__all__ = ["EventLoop", "in_event_loop"]

logger = logging.getLogger(__name__)

# How long coroutines that were cancelled at the end have to end, in seconds.
_CANCELLED_WITHIN = 1.0


def in_event_loop() -> bool:
    """Whether the current thread runs an asyncio event loop."""
    return asyncio._get_running_loop() is not None


class EventLoop:
    """An asyncio event loop in a thread that starts with the first coroutine.

    It runs on until `close`, also where a coroutine stops it.

    Args:
        name: the thread's name.
        context: the context that coroutines start from.

    All methods may be called from any thread.
    """

    def __init__(self, name: str, context: contextvars.Context) -> None:
        self._name = name
        self._context = context
        # Guards the thread's start and end.
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        # Changed in the loop's thread only.
        self._tasks: set[asyncio.Task[None]] = set()
        # Coroutines that are to begin; single operations on a set are atomic.
        self._coming: set[Coroutine[Any, Any, None]] = set()
        self._closed = False
        # Set in the loop's thread, once it is to end.
        self._ending = False

    def run(self, coroutine: Coroutine[Any, Any, None], context: contextvars.Context) -> None:
        """Runs ``coroutine`` in ``context``.

        Args:
            coroutine: handles all its errors itself: SystemExit would end the loop.
            context: the context of its task.

        Raises:
            RuntimeError: the loop is closed.
        """
        loop = self._started()
        tasks = self._tasks

        def start() -> None:
            self._coming.discard(coroutine)
            # The loop itself keeps no reference to its tasks.
            task = context.run(loop.create_task, coroutine)
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        self._coming.add(coroutine)
        try:
            loop.call_soon_threadsafe(start)
        except RuntimeError:  # it has closed meanwhile
            self._coming.discard(coroutine)
            raise

    def under_way(self) -> tuple[list[asyncio.Task[None]], list[Coroutine[Any, Any, None]]]:
        """The tasks that are not done, and the coroutines that are still to begin."""
        return list(self._tasks), list(self._coming)

    @property
    def coming(self) -> int:
        """How many coroutines are still to begin."""
        return len(self._coming)

    @property
    def thread(self) -> threading.Thread | None:
        """The loop's thread, where it has started."""
        return self._thread

    def close(self, timeout: float) -> None:
        """Cancels what runs and ends the thread, waiting ``timeout`` seconds for it at most."""
        with self._lock:
            first, self._closed = not self._closed, True
            loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        if first:
            with contextlib.suppress(RuntimeError):  # somebody else has closed it
                loop.call_soon_threadsafe(self._end, loop)
        if thread is not threading.current_thread():
            thread.join(timeout)
        self._coming.clear()  # what they refer to must not live on in here

    def runs_here(self) -> bool:
        """Whether the current thread is the loop's."""
        return self._thread is threading.current_thread()

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._closed:
                raise RuntimeError("the worker is shutting down and runs no more coroutines")
            if self._loop is None or self._loop.is_closed():
                self._loop = asyncio.new_event_loop()
                self._thread = ContextThread(self._context, self._name, self._serve, (self._loop,))
                self._thread.start()
            return self._loop

    # -- in the loop's thread ------------------------------------------------------------

    def _end(self, loop: asyncio.AbstractEventLoop) -> None:
        self._ending = True
        loop.stop()

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            while not (self._ending or loop.is_closed()):
                self._go_on(loop.run_forever)
            if not loop.is_closed():
                self._cancel_all(loop)
        finally:
            loop.close()

    def _cancel_all(self, loop: asyncio.AbstractEventLoop) -> None:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._complete(loop, asyncio.wait(tasks, timeout=_CANCELLED_WITHIN))
        self._complete(loop, loop.shutdown_asyncgens())

    def _complete(self, loop: asyncio.AbstractEventLoop, last: Coroutine[Any, Any, object]) -> None:
        deadline = loop.time() + 2 * _CANCELLED_WITHIN
        future = loop.create_task(last)
        while not future.done() and loop.time() < deadline:
            # Where it is stopped before that, this raises RuntimeError.
            with contextlib.suppress(RuntimeError):
                self._go_on(lambda: loop.run_until_complete(future))

    def _go_on(self, run: Callable[[], object]) -> None:
        """Runs the loop, which any coroutine may stop, and which SystemExit in a task leaves."""
        try:
            run()
        except (SystemExit, KeyboardInterrupt) as error:
            logger.warning("%s goes on after %r in a coroutine", self._name, error)

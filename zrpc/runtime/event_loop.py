"""The thread that runs the ``async def`` handlers of one worker."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import select
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from zrpc.runtime.context_thread import ContextThread
from zrpc.runtime.interrupts import UninterruptedLock, run_interruptibly

logger = logging.getLogger(__name__)

# Seconds that coroutines have to finish after close() has cancelled them.
_CANCEL_SECONDS = 1.0


# Returns the event loop that the current thread runs, or None.
running_loop = asyncio._get_running_loop


class EventLoop:
    """An asyncio event loop in a thread that starts with the first coroutine.

    It runs until `close`, even if a coroutine stops it.

    Args:
        name: the thread's name.
        context: the thread's context, which coroutines start from.

    Attributes:
        thread: the loop's thread, or None if it has not started.

    All methods may be called from any thread.
    """

    def __init__(self, name: str, context: contextvars.Context) -> None:
        self._name = name
        self._context = context
        # Guards the thread's start and end.
        self._lock = UninterruptedLock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.thread: threading.Thread | None = None
        # Changed in the loop's thread only.
        self._tasks: set[asyncio.Task[None]] = set()
        # Coroutines that have not begun, the oldest first; single operations on a dict are atomic.
        self._coming: dict[Coroutine[Any, Any, None], None] = {}
        self._closed = False
        # Set in the loop's thread when it must end.
        self._ending = False

    def run(self, coroutine: Coroutine[Any, Any, None], context: contextvars.Context) -> None:
        """Runs ``coroutine`` in ``context``.

        Args:
            coroutine: must handle all its errors itself: SystemExit would stop the loop. It is
                closed if it can't be run.
            context: the context of its task.

        Raises:
            OSError: the system has no descriptors for a loop.
            RuntimeError: the loop is closed, or the system refuses it a thread.
        """
        tasks = self._tasks

        def start() -> None:
            self._coming.pop(coroutine, None)
            # The loop itself keeps no reference to its tasks.
            task = context.run(loop.create_task, coroutine)
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        try:
            loop = self._started()
            self._coming[coroutine] = None
            loop.call_soon_threadsafe(start)
        except (OSError, RuntimeError):
            self._coming.pop(coroutine, None)
            coroutine.close()  # or Python would warn that nobody has awaited it
            raise

    def call_later(self, seconds: float, job: Callable[[], object]) -> None:
        """Calls ``job()`` in the loop's thread after a time; it must be quick, and raise nothing.

        Raises:
            RuntimeError: the loop is closed.
        """
        loop = self._started()
        loop.call_soon_threadsafe(loop.call_later, seconds, job)

    def coming(self) -> list[Coroutine[Any, Any, None]]:
        """Returns the coroutines that have not begun, the oldest first."""
        return list(self._coming)

    def close(self, timeout: float) -> None:
        """Cancels all coroutines and stops the thread; waits at most ``timeout`` seconds for it."""
        with self._lock:
            first, self._closed = not self._closed, True
            loop, thread = self._loop, self.thread
        if loop is None or thread is None:
            return
        if first:
            with contextlib.suppress(RuntimeError):  # other code has closed it
                loop.call_soon_threadsafe(self._end, loop)
        if thread is not threading.current_thread():
            run_interruptibly(thread.join, timeout)
        self._coming.clear()  # they must not be kept alive from here

    def runs_here(self) -> bool:
        """Returns whether the current thread is the loop's."""
        return self.thread is threading.current_thread()

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._closed:
                raise RuntimeError("the worker is shutting down and runs no more coroutines")
            if self._loop is None or self._loop.is_closed():
                loop = _new_loop()
                thread = ContextThread(self._context, self._name, self._serve, (loop,))
                try:
                    thread.start()
                except BaseException:
                    loop.close()  # the system refuses another thread: the next call tries again
                    raise
                self._loop, self.thread = loop, thread
            return self._loop

    # -- in the loop's thread ------------------------------------------------------------

    def _end(self, loop: asyncio.AbstractEventLoop) -> None:
        self._ending = True
        loop.stop()

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            while not (self._ending or loop.is_closed()):
                self._survive(loop.run_forever)
            if not loop.is_closed():
                self._cancel_all(loop)
        finally:
            loop.close()

    def _cancel_all(self, loop: asyncio.AbstractEventLoop) -> None:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._complete(loop, asyncio.wait(tasks, timeout=_CANCEL_SECONDS))
        self._complete(loop, loop.shutdown_asyncgens())

    def _complete(self, loop: asyncio.AbstractEventLoop, last: Coroutine[Any, Any, object]) -> None:
        deadline = loop.time() + 2 * _CANCEL_SECONDS
        future = loop.create_task(last)
        while not future.done() and loop.time() < deadline:
            # Raises RuntimeError if a coroutine stops the loop first.
            with contextlib.suppress(RuntimeError):
                self._survive(lambda: loop.run_until_complete(future))

    def _survive(self, run: Callable[[], object]) -> None:
        """Runs the loop and logs SystemExit and KeyboardInterrupt of coroutines."""
        try:
            run()
        except (SystemExit, KeyboardInterrupt) as error:
            logger.warning("%s goes on after %r in a coroutine", self._name, error)


def _new_loop() -> asyncio.AbstractEventLoop:
    """Returns a new event loop, or raises an OSError if there are no descriptors for one.

    A loop whose making fails halfway prints errors when it is freed. So as many are opened before.
    """
    with select.epoll():
        for end in socket.socketpair():
            end.close()
    return asyncio.new_event_loop()

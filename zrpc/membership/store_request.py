"""Requests to a store, for whose answers a thread waits only until a deadline.

TCPStore waits for its host's answer in C++, without limit, and past Ctrl-C. A host that is stopped,
or cut off, would hold up all the workers that meet in its store.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from zrpc.errors import RendezvousError
from zrpc.runtime.interrupts import UninterruptedLock

__all__ = ["StoreThread"]

T = TypeVar("T")

# Also a request that begins at its deadline has this long: those that find out what is missing do.
_LEAST_SECONDS = 1.0
# How long a thread that is interrupted waits for an answer that is almost there.
_MOMENT_SECONDS = 0.2


class StoreThread:
    """Makes requests in a thread of its own, which starts with the first one.

    If there is no answer, that thread stays until the connection to the store breaks, or the
    process ends. The next request is then made in another one.

    Any thread may call its methods.
    """

    def __init__(self) -> None:
        # Guards the two below, and the order in which requests and the end are put.
        self._lock = UninterruptedLock()
        self._thread: threading.Thread | None = None
        # For that thread; None ends it.
        self._requests: queue.SimpleQueue[_Request[Any] | None] = queue.SimpleQueue()

    def request(self, call: Callable[[], T], deadline: float) -> T:
        """Makes a request to a store; returns its answer.

        Args:
            call: makes the request.
            deadline: on the clock of ``time.monotonic``.

        Raises:
            RendezvousError: there is no answer in time.
            Exception: as ``call`` raises it.
        """
        begun = time.monotonic()
        request = _Request(call)
        with self._lock:
            if self._thread is None:
                self._requests = queue.SimpleQueue()
                self._thread = threading.Thread(
                    target=_serve, args=(self._requests,), name="zrpc-store", daemon=True
                )
                try:
                    self._thread.start()
                except RuntimeError:  # the system refuses another thread
                    self._thread = None
                    raise
            self._requests.put(request)
        try:
            request.done.acquire(timeout=max(_LEAST_SECONDS, deadline - begun))
        except BaseException:  # Ctrl-C
            request.done.acquire(timeout=_MOMENT_SECONDS)
            self._abandon()
            raise
        if request.errors:
            raise request.errors[0]
        if not request.answers:
            self._abandon()
            raise RendezvousError(
                "expected the store in which the workers meet to answer, found no answer for "
                f"{time.monotonic() - begun:.1f} s: its host, which is rank 0 or the launcher, is "
                "stopped, or the network to it is cut"
            )
        return request.answers[0]

    def close(self) -> None:
        """Ends the thread. A later request starts another one."""
        thread = self._abandon()
        if thread is not None:
            thread.join()  # at once: it waits for no answer

    def _abandon(self) -> threading.Thread | None:
        """Returns the thread, which ends when it has an answer to what it waits for."""
        with self._lock:
            self._requests.put(None)
            thread, self._thread = self._thread, None
        return thread


class _Request(Generic[T]):
    """A request, and a lock that is released when it is done."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self.answers: list[T] = []
        self.errors: list[BaseException] = []
        self.done = threading.Lock()
        self.done.acquire()

    def make(self) -> None:
        try:
            self.answers.append(self._call())
        except BaseException as error:
            self.errors.append(error)
        finally:
            self.done.release()


def _serve(requests: queue.SimpleQueue[_Request[Any] | None]) -> None:
    while (request := requests.get()) is not None:
        request.make()
        del request  # its answer is not kept until the next one

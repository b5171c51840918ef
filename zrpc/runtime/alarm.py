"""An alarm: has something looked at when the first of several times has come."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import partial
from time import monotonic

from zrpc.runtime.event_loop import EventLoop


class Alarm:
    """Calls a function in an event loop's thread. Any thread may call its methods.

    Args:
        loop: the event loop.
        look: does what is due, and returns when it must be called again, or infinity.
    """

    def __init__(self, loop: EventLoop, look: Callable[[], float]) -> None:
        self._loop = loop
        self._look = look
        self._lock = threading.Lock()  # guards what follows; no other lock is taken with it
        self._next = math.inf

    def set(self, due: float) -> None:
        """Sets the alarm to a time on the clock of ``time.monotonic``, unless it rings before."""
        with self._lock:
            if due >= self._next:
                return
            self._next = due
        self._loop.call_later(max(0.0, due - monotonic()), partial(self._ring, due))

    def _ring(self, due: float) -> None:
        with self._lock:
            if self._next == due:
                self._next = math.inf
        self.set(self._look())

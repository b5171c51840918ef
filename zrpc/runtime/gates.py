"""Gates of several threads that wait for the same event."""

from __future__ import annotations

import contextlib
import threading

from zrpc.runtime.interrupts import UninterruptedLock


class Gates:
    """Gates that are opened together; see `zrpc.runtime.thread_pool.pass_gate`.

    A thread adds a gate, then looks whether the event has been, and passes the gate if not. So it
    misses none. Any thread may call the methods.

    Example:
        >>> gates = Gates()
        >>> gate = gates.add()
        >>> gates.open()
        >>> gate.locked()
        False
    """

    def __init__(self) -> None:
        self._lock = UninterruptedLock()  # guards what follows; no other lock is taken with it
        self._closed: list[threading.Lock] = []
        self._ended = False

    def add(self) -> threading.Lock:
        """Returns a gate that the next `open` opens; an open one after `end`."""
        gate = threading.Lock()
        with self._lock:
            if not self._ended:
                gate.acquire()
                self._closed.append(gate)
        return gate

    def forget(self, gate: threading.Lock) -> None:
        """Forgets a gate at which nobody waits any longer, opened or not."""
        with self._lock, contextlib.suppress(ValueError):  # it was opened
            self._closed.remove(gate)

    def open(self) -> None:
        """Opens all gates."""
        with self._lock:
            gates, self._closed = self._closed, []
        for gate in gates:
            gate.release()

    def end(self) -> None:
        """Opens all gates, also those that are added from now on."""
        self._ended = True
        self.open()

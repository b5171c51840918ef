"""What one worker receives for one backward pass."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from zrpc.runtime.interrupts import UninterruptedLock
from zrpc.runtime.thread_pool import pass_gate
from zrpc.services.autograd.dependencies import Origin

__all__ = ["Mailbox", "ReceiveHere"]

# See `zrpc.runtime.thread_pool.pass_gate`.
ReceiveHere = Callable[[threading.Lock, float], None]


class Mailbox:
    """What arrives for a pass, and the error that it fails with. Any thread may use it.

    What arrives has the name of its sender and the number of the message whose gradients these
    are, or 0 if the sender has ended its part. One thread waits: the one that runs the engine.
    """

    def __init__(self) -> None:
        # Guards what follows; nothing else is locked under it.
        self._lock = UninterruptedLock()
        self._closed = False
        self._arrived: dict[Origin, Any] = {}
        self._failure: Callable[[], Exception] | None = None
        # What a thread waits for, at a gate that is released when it arrives or the pass fails.
        self._awaited: tuple[Origin, threading.Lock] | None = None

    def wait(self, origin: Origin, receive: ReceiveHere) -> Any:
        """Waits for something to arrive and takes it; raises if the pass fails meanwhile."""
        with self._lock:
            waits = origin not in self._arrived and self._failure is None
            if waits:
                gate = threading.Lock()
                gate.acquire()
                self._awaited = origin, gate
        if waits:
            pass_gate(gate, receive=receive)  # until `deliver`, or `fail`
        self.check()
        return self._arrived.pop(origin)

    def deliver(self, origin: Origin, content: Any) -> None:
        """Takes what has arrived, unless the part has ended here."""
        with self._lock:
            if not self._closed:
                self._arrived.setdefault(origin, content)
                if self._awaited is not None and self._awaited[0] == origin:
                    self._release()

    def fail(self, failure: Callable[[], Exception]) -> bool:
        """Fails the pass; returns False if it has failed already, or its part has ended here."""
        with self._lock:
            if self._failure is not None or self._closed:
                return False
            self._failure = failure
            self._release()
            return True

    def check(self) -> None:
        """Raises the error of the pass if it has failed."""
        failure = self._failure
        if failure is not None:
            raise failure()

    def close(self) -> None:
        """Ends this worker's part: what arrives from now on is dropped."""
        with self._lock:
            self._closed = True
            self._arrived.clear()

    def _release(self) -> None:
        """Lets the thread go on that waits, if one does; under the lock."""
        if self._awaited is not None:
            self._awaited[1].release()
            self._awaited = None

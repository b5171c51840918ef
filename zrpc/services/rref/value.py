"""A value at its owner: not made yet, ready, or failed."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any

from zrpc.errors import RemoteError, RpcTimeoutError
from zrpc.runtime.thread_pool import acquire

__all__ = ["OwnedValue"]


class OwnedValue:
    """The value that an RRef refers to. All methods may be called from any thread.

    Attributes:
        begun: whether the call that makes the value has arrived; others may ask for it before.
    """

    __slots__ = ("_error", "_followers", "_lock", "_ready", "_value", "begun")

    def __init__(self) -> None:
        self.begun = False
        self._value: Any = None
        self._error: BaseException | None = None
        # Whether there is a value or an error; set last, and read without the lock.
        self._ready = False
        # Guards the followers; they are called without it.
        self._lock = threading.Lock()
        self._followers: list[Callable[[], None]] | None = None  # usually there are none

    def set(self, value: Any = None, error: BaseException | None = None) -> None:
        """Sets the value or the error, once, and calls the followers."""
        with self._lock:
            if self._ready:
                return
            self._value, self._error = value, error
            if error is not None:
                # As text: the frames of a traceback would keep the call's arguments alive.
                lines = traceback.format_exception(type(error), error, error.__traceback__)
                error.__context__ = None
                error.__cause__ = RemoteError("".join(lines))
                error.__traceback__ = None
            self._ready = True
            followers, self._followers = self._followers, None
        for follower in followers or ():
            follower()

    def when_ready(self, follower: Callable[[], None]) -> None:
        """Calls ``follower()`` when there is a value or an error: now, if there is one already."""
        with self._lock:
            if not self._ready:
                if self._followers is None:
                    self._followers = []
                self._followers.append(follower)
                return
        follower()

    def get(self, timeout: float = 0) -> Any:
        """Waits for the value and returns it, or raises the error.

        Raises:
            RpcTimeoutError: the timeout, in seconds, passed first; 0 means no limit.
        """
        if not self._ready:
            self._wait(timeout)
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._value

    def _wait(self, timeout: float) -> None:
        gate = threading.Lock()
        gate.acquire()
        release = gate.release
        self.when_ready(release)
        try:
            if not acquire(gate, timeout or -1):
                raise RpcTimeoutError(
                    f"RPC ran for more than set timeout ({timeout * 1000:.0f} ms) and will now be "
                    "marked with an error: the RRef's value has not been made yet"
                )
        finally:
            with self._lock:
                if self._followers is not None and release in self._followers:
                    self._followers.remove(release)

"""A value at its owner: on its way, there, or failed."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any

from zrpc.errors import RemoteError, RpcTimeoutError
from zrpc.pool import acquire

__all__ = ["OwnedValue"]


class OwnedValue:
    """What an RRef refers to. All methods may be called from any thread.

    Attributes:
        begun: whether the call that makes it has arrived; others may ask for it before.
    """

    __slots__ = ("_error", "_followers", "_lock", "_there", "_value", "begun")

    def __init__(self) -> None:
        self.begun = False
        self._value: Any = None
        self._error: BaseException | None = None
        # Whether there is one of the two; set last, and read without the lock.
        self._there = False
        # Guards the followers; they are called without it.
        self._lock = threading.Lock()
        self._followers: list[Callable[[], None]] | None = None  # mostly there are none

    def set(self, value: Any = None, error: BaseException | None = None) -> None:
        """Settles what the value is, once, and calls those that wait for it."""
        with self._lock:
            if self._there:
                return
            self._value, self._error = value, error
            if error is not None:
                # As text: the frames of a traceback would keep the call's arguments alive.
                lines = traceback.format_exception(type(error), error, error.__traceback__)
                error.__context__ = None
                error.__cause__ = RemoteError("".join(lines))
                error.__traceback__ = None
            self._there = True
            followers, self._followers = self._followers, None
        for follower in followers or ():
            follower()

    def when_ready(self, follower: Callable[[], None]) -> None:
        """Calls ``follower()`` once there is a value or an error, at once where there is."""
        with self._lock:
            if not self._there:
                if self._followers is None:
                    self._followers = []
                self._followers.append(follower)
                return
        follower()

    def get(self, timeout: float = 0) -> Any:
        """The value itself, waited for, or the error that there is instead.

        Args:
            timeout: seconds; 0 means none.

        Raises:
            RpcTimeoutError: the timeout passed first.
        """
        if not self._there:
            self._wait(timeout)
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._value

    def _wait(self, timeout: float) -> None:
        gate = threading.Lock()
        gate.acquire()
        opened = gate.release
        self.when_ready(opened)
        try:
            if not acquire(gate, timeout or -1):
                raise RpcTimeoutError(
                    f"RPC ran for more than set timeout ({timeout * 1000:.0f} ms) and will now be "
                    "marked with an error: the RRef's value is not made yet"
                )
        finally:
            with self._lock:
                if self._followers is not None and opened in self._followers:
                    self._followers.remove(opened)

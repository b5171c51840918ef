"""Signals to the launcher, as something that a selector can wait for."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from types import FrameType
from typing import Any

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")
_OTHER = 0  # not a signal's number: a wakeup by `wake`


class SignalInbox:
    """While entered, collects signals instead of letting them end the process.

    Signals can be caught in the main thread alone; elsewhere this only offers `wake`. A signal
    that was ignored before, as SIGHUP under nohup, stays ignored.
    """

    def __init__(self) -> None:
        self._reading, self._writing = socket.socketpair()
        self._reading.setblocking(False)
        self._writing.setblocking(False)
        self._handlers: dict[int, Any] = {}
        self._wakeup_fd = -1

    def fileno(self) -> int:
        """A descriptor that is readable when `take` has something to tell."""
        return self._reading.fileno()

    def take(self) -> set[int]:
        """The signals that came since the last call, as numbers."""
        numbers: set[int] = set()
        with contextlib.suppress(BlockingIOError):
            while data := self._reading.recv(4096):
                numbers.update(data)
        return numbers - {_OTHER}

    def wake(self) -> None:
        """Make the inbox readable, from any thread."""
        with contextlib.suppress(OSError):  # full, so it is readable; or closed
            self._writing.send(bytes([_OTHER]))

    def __enter__(self) -> SignalInbox:
        if threading.current_thread() is threading.main_thread():
            # The numbers come from here, so that no signal is lost just before a wait.
            self._wakeup_fd = signal.set_wakeup_fd(
                self._writing.fileno(), warn_on_full_buffer=False
            )
            for number in (getattr(signal, name, None) for name in _NAMES):
                if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                    self._handlers[number] = signal.signal(number, _only_wake)
        return self

    def __exit__(self, *error: object) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._handlers.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
            signal.set_wakeup_fd(self._wakeup_fd)
        self._handlers.clear()

    def close(self) -> None:
        """Release the descriptors, once no signals are collected any more."""
        self._reading.close()
        self._writing.close()


def _only_wake(number: int, frame: FrameType | None) -> None:
    pass

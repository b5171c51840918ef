"""Signals to the launcher, in a form that a selector can wait for."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")
_WAKE = 0  # written by `wake`; not a signal's number


class SignalInbox:
    """Collects signals, while entered, instead of letting them have their usual effects.

    Signals can be caught only in the main thread; in another, only `wake` has an effect. A signal
    that was ignored before, such as SIGHUP under nohup, stays ignored.

    Args:
        names: The signals to collect. Those that the system doesn't have are left out.

    Attributes:
        fds: All its descriptors.
    """

    def __init__(self, names: Sequence[str] = _NAMES) -> None:
        self._names = names
        self._reading, self._writing = socket.socketpair()
        self._reading.setblocking(False)
        self._writing.setblocking(False)
        self.fds = {self._reading.fileno(), self._writing.fileno()}
        self._handlers: dict[int, Any] = {}
        self._wakeup_fd = -1

    def fileno(self) -> int:
        """Returns a descriptor that is readable when there is something to `take`."""
        return self._reading.fileno()

    def take(self) -> set[int]:
        """Returns the numbers of the signals that came since the last call."""
        numbers: set[int] = set()
        with contextlib.suppress(BlockingIOError):
            while data := self._reading.recv(4096):
                numbers.update(data)
        return numbers - {_WAKE}

    def wake(self) -> None:
        """Makes the inbox readable, from any thread."""
        with contextlib.suppress(OSError):  # it is full, and so readable; or it is closed
            self._writing.send(bytes([_WAKE]))

    def __enter__(self) -> SignalInbox:
        if threading.current_thread() is threading.main_thread():
            # Python writes the numbers there, so that no signal is lost just before a wait.
            self._wakeup_fd = signal.set_wakeup_fd(
                self._writing.fileno(), warn_on_full_buffer=False
            )
            for number in (getattr(signal, name, None) for name in self._names):
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
        """Closes the descriptors, once no more signals are collected."""
        self._reading.close()
        self._writing.close()


def _only_wake(number: int, frame: FrameType | None) -> None:
    """Handles a signal by doing nothing, so that only the wakeup descriptor gets it."""

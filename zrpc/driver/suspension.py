"""Ctrl-Z in the driver's terminal: the workers, which have sessions of their own, are stopped too.

Otherwise they would find that the driver no longer answers, and declare it dead.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType


class Suspension:
    """Stops and continues workers with this process, unless the program handles Ctrl-Z itself.

    `begin` and `end` do nothing outside of the main thread, since no other can handle signals.

    Args:
        send: sends a signal to all workers.
    """

    def __init__(self, send: Callable[[int], None]) -> None:
        self._send = send

    def begin(self) -> None:
        """Handles Ctrl-Z from now on."""
        if _in_main_thread() and signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
            signal.signal(signal.SIGTSTP, self._suspend)

    def end(self) -> None:
        """Gives Ctrl-Z its default effect again."""
        if _in_main_thread() and signal.getsignal(signal.SIGTSTP) == self._suspend:
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        """Runs in the main thread; returns when this process is continued."""
        self._send(signal.SIGSTOP)
        # It acts when it is no longer blocked; not at all in a group that no shell watches.
        signal.pthread_sigmask(signal.SIG_BLOCK, {number})
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        signal.signal(number, self._suspend)
        self._send(signal.SIGCONT)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()

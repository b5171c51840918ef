"""Which signals a process ignores and blocks: what it passes on to each program that it starts."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import NamedTuple

# The interpreter itself ignores these, and nobody can see what it was given.
_OF_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}


class SignalState(NamedTuple):
    """The signals that a process was told to ignore and to block, by their numbers.

    Supervisors, shells and CI runners start programs with some signals ignored or blocked. Workers
    get that state. The launcher and the fork server can't work with it: a process that ignores
    SIGCHLD learns no exit code, and one that blocks SIGTERM can't be stopped.
    """

    ignored: tuple[int, ...] = ()
    blocked: tuple[int, ...] = ()

    @classmethod
    def current(cls) -> SignalState:
        """Returns this process's state; what is blocked is blocked in this thread."""
        ignored = [
            int(number)
            for number in signal.valid_signals() - _OF_PYTHON
            if signal.getsignal(number) == signal.SIG_IGN
        ]
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        return cls(tuple(sorted(ignored)), tuple(sorted(int(number) for number in blocked)))

    def ignore(self) -> None:
        """Ignores the signals to ignore. For the main thread."""
        for number in self.ignored:
            signal.signal(number, signal.SIG_IGN)

    def restore(self) -> None:
        """Makes this the state of this process. For the main thread."""
        self.ignore()
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """Lets this process learn of its children, and blocks nothing, within the block.

        Ignored signals stay ignored, such as SIGHUP under nohup, except for SIGCHLD.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        receive_signals()
        try:
            yield
        finally:
            self.restore()


def receive_signals() -> None:
    """Gives SIGCHLD its usual effect, and unblocks all signals. For the main thread."""
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """Blocks all signals in this thread, and in processes that it starts in the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

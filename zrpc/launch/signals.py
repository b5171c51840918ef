"""Signals to the launcher, in a form that a selector can wait for, and what it passes on of them.

A process passes on to each program that it starts which signals it ignores and blocks.
"""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator, Set
from types import FrameType
from typing import Any, NamedTuple

# Each stops all workers.
STOPS: Set[int] = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM}
# Each is passed on to the workers.
FORWARDED: Set[int] = {signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGWINCH}
# Each suspends the launcher and all workers, until they are continued.
SUSPENDS: Set[int] = {signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
_WAKE = 0  # written by `wake`; not a signal's number


class SignalInbox:
    """Collects signals, while entered, instead of letting them have their usual effects.

    For the main thread, except for `wake`. A signal that was ignored before, such as SIGHUP under
    nohup, stays ignored. It can be entered once.

    Args:
        numbers: The signals to collect.

    Attributes:
        fds: All its descriptors.
    """

    def __init__(self, numbers: Set[int] = STOPS) -> None:
        self._numbers = numbers
        self._reading, self._writing = socket.socketpair()
        self._reading.setblocking(False)
        self._writing.setblocking(False)
        self.fds = {self._reading.fileno(), self._writing.fileno()}
        self._handlers: dict[int, Any] = {}
        self._wakeup_fd = -1
        self._untaken: set[int] = set()
        self._interrupts: Set[int] = frozenset()

    def fileno(self) -> int:
        """Returns a descriptor that is readable when signals have come since the last look."""
        return self._reading.fileno()

    def take(self) -> set[int]:
        """Returns the numbers of the signals that came since the last call."""
        self._read()
        numbers, self._untaken = self._untaken, set()
        return numbers

    def has(self, numbers: Set[int]) -> bool:
        """Returns whether one of these signals has come, and leaves it to `take`."""
        self._read()
        return not self._untaken.isdisjoint(numbers)

    def discard(self, numbers: Set[int]) -> None:
        """Forgets these signals, if they have come."""
        self._read()
        self._untaken -= numbers

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := self._reading.recv(4096):
                self._untaken.update(data)
        self._untaken.discard(_WAKE)

    def wake(self) -> None:
        """Makes the inbox readable, from any thread."""
        with contextlib.suppress(OSError):  # it is full, and so readable; or it is closed
            self._writing.send(bytes([_WAKE]))

    @contextlib.contextmanager
    def interrupting(self, numbers: Set[int]) -> Iterator[None]:
        """Raises KeyboardInterrupt, once, if one of these signals comes or has come."""
        self._interrupts = numbers
        try:
            if self.has(numbers):
                raise KeyboardInterrupt
            yield
        finally:
            self._interrupts = frozenset()

    def collect(self, numbers: Set[int]) -> None:
        """Collects these signals, too."""
        for number in numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Does nothing, mostly: the wakeup descriptor has got the signal."""
        if number in self._interrupts:
            self._interrupts = frozenset()
            raise KeyboardInterrupt

    def __enter__(self) -> SignalInbox:
        # Python writes the numbers there, so that no signal is lost just before a wait.
        self._wakeup_fd = signal.set_wakeup_fd(self._writing.fileno(), warn_on_full_buffer=False)
        self.collect(self._numbers)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        signal.set_wakeup_fd(self._wakeup_fd)
        self._reading.close()
        self._writing.close()


def let_act(number: int) -> None:
    """Lets a signal have its default effect on this process. Returns when it is continued.

    If that has none, as in a process group that no shell watches, it returns at once. For the main
    thread.
    """
    # Another thread that writes to the terminal may get the signal too, and stop this process
    # first. When it is continued, the system drops the one that is held back here.
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    signal.raise_signal(number)
    handler = signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    signal.signal(number, handler)


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

    def restore(self) -> None:
        """Makes this the state of this process. For the main thread."""
        for number in self.ignored:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)


def receive_signals() -> None:
    """Gives SIGCHLD its usual effect, and unblocks all signals. For the main thread.

    Ignored signals stay ignored, such as SIGHUP under nohup, except for SIGCHLD.
    """
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

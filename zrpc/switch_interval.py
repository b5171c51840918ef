"""How long a thread of this process may keep the interpreter's lock while others wait for it.

Python's own setting is 5 ms (``sys.getswitchinterval``). A handler that computes without a pause
keeps the thread that receives waiting for so long, at every message. The setting is the process's,
in which several agents may live.
"""

from __future__ import annotations

import os
import sys
import threading

__all__ = ["SwitchInterval"]

# What Python keeps is a whole number of microseconds, and cuts off what is more.
_HALF = 0.5e-6


class SwitchInterval:
    """What one agent asks for. All methods may be called from any thread.

    While any asks, the process's interval is the smallest of those asked for and of what it was
    before. When the last one ends, it is again what it was before; where somebody else has changed
    it meanwhile, it stays as it is.

    Args:
        seconds: the interval, rounded to microseconds; 0 leaves Python's setting alone.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def ask(self) -> None:
        """Has the interval be no longer than this, until `give_back`."""
        if self.seconds:
            with _process.lock:
                _process.add(self)

    def give_back(self) -> None:
        """Asks no more; does nothing where that is so already."""
        with _process.lock:
            _process.discard(self)


class _Process:
    """The setting of this process; the lock guards all of it, and is taken last."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._asking: set[SwitchInterval] = set()
        self._before = 0.0
        self._ours = 0.0  # as Python told it after it was set here

    def add(self, interval: SwitchInterval) -> None:
        current = sys.getswitchinterval()
        if not self._asking or current != self._ours:
            self._before = current
        self._asking.add(interval)
        self._adapt()

    def discard(self, interval: SwitchInterval) -> None:
        if interval in self._asking:
            self._asking.remove(interval)
            if sys.getswitchinterval() == self._ours:
                self._adapt()

    def after_fork(self) -> None:
        """In a child process there are no agents: their threads have stayed behind."""
        self.lock = threading.Lock()
        for interval in list(self._asking):
            self.discard(interval)

    def _adapt(self) -> None:
        wanted = min([self._before, *(each.seconds for each in self._asking)])
        sys.setswitchinterval(wanted + _HALF)
        self._ours = sys.getswitchinterval()


_process = _Process()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_process.after_fork)

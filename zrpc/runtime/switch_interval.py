"""How long a thread of this process may keep the interpreter's lock while others wait for it.

Python's default is 5 ms (``sys.getswitchinterval``). A handler that computes without a pause keeps
the receiving thread waiting for that time, at every message. The setting belongs to the process, in
which several agents may live.
"""

from __future__ import annotations

import os
import sys
from typing import ClassVar

from zrpc.runtime.interrupts import UninterruptedLock

# Added before setting, since Python cuts the interval off to whole microseconds.
_ROUNDING_SECONDS = 0.5e-6


class SwitchInterval:
    """The interval that one agent asks for. All methods may be called from any thread.

    While any agent asks, the process's interval is the smallest of those asked for and of the
    previous one. When the last agent stops asking, the previous one is restored. If other code has
    changed it in the meantime, it stays as it is.

    Args:
        seconds: the interval, rounded to microseconds; 0 leaves Python's setting unchanged.
    """

    # Of this process. The lock guards the rest, and is taken last.
    _lock = UninterruptedLock()
    _asking: ClassVar[set[SwitchInterval]] = set()
    _before = 0.0
    _ours = 0.0  # as Python reported it after it was set here

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def ask(self) -> None:
        """Limits the process's interval to this one, until `give_back`."""
        process = SwitchInterval
        if self.seconds:
            with process._lock:
                current = sys.getswitchinterval()
                if not process._asking or current != process._ours:
                    process._before = current
                process._asking.add(self)
                process._adapt()

    def give_back(self) -> None:
        """Stops asking. Idempotent."""
        with SwitchInterval._lock:
            self._discard()

    def _discard(self) -> None:
        if self in self._asking:
            self._asking.remove(self)
            if sys.getswitchinterval() == self._ours:
                self._adapt()

    @classmethod
    def _adapt(cls) -> None:
        wanted = min([cls._before, *(each.seconds for each in cls._asking)])
        sys.setswitchinterval(wanted + _ROUNDING_SECONDS)
        cls._ours = sys.getswitchinterval()

    @classmethod
    def _after_fork(cls) -> None:
        """Discards all agents in a child process, which does not have their threads."""
        cls._lock = UninterruptedLock()
        for interval in list(cls._asking):
            interval._discard()


os.register_at_fork(after_in_child=SwitchInterval._after_fork)

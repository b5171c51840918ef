"""Whether the value of a call was taken by what has waited for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from zrpc.runtime.forks import free_in_child
from zrpc.runtime.interrupts import UninterruptedLock

# Guards what all of them know; it is not held while one tells its answer.
_lock = free_in_child(UninterruptedLock())


@dataclass(slots=True, eq=False)
class Taking:
    """Whether the value of a call was taken; told once, if it is asked for.

    When the value has come, the task that awaits it may be cancelled before it goes on, or Ctrl-C
    may end the wait. Any thread may call its methods.

    Attributes:
        waiting: the number of tasks, threads and futures that wait for it.
    """

    waiting: int = 0
    _left: bool = False  # whether a task, or a thread, waits no longer and has not taken it
    _taken: bool | None = None
    _tell: list[Callable[[bool], None]] = field(default_factory=list)

    @staticmethod
    def of(call: Any) -> Taking:
        """Returns the `Taking` of a call; makes it if there is none yet."""
        with _lock:
            taking: Taking = call.taking or Taking()
            call.taking = taking
        return taking

    def join(self) -> Taking:
        """Notes that one more waits."""
        with _lock:
            self.waiting += 1
        return self

    def ask(self, tell: Callable[[bool], None]) -> None:
        """Calls ``tell`` with the answer, now or later; the value has come. In the I/O thread."""
        self._tell.append(tell)
        self._answer()

    def end(self, taken: bool | None) -> None:
        """Notes that one waits for the value no longer.

        Args:
            taken: whether it was taken; None for a future, which takes it if nothing else waits,
                or did.
        """
        with _lock:
            self.waiting -= 1
            if taken is None:
                taken = not (self.waiting or self._left)
            elif not taken:
                self._left = True
            if self._taken is None and (taken or not self.waiting):
                self._taken = taken
        self._answer()

    def _answer(self) -> None:
        if self._taken is not None:
            with contextlib.suppress(IndexError):  # another thread has told it
                self._tell.pop()(self._taken)

"""Whether the value of a call was taken by what has waited for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Taking:
    """Whether the value of a call was taken; told once, if it is asked for.

    When the value has come, the task that awaits it may be cancelled before it goes on, or Ctrl-C
    may end the wait.

    Attributes:
        tasks: the number of tasks, or threads, that wait for it.
    """

    tasks: int = 0
    _taken: bool | None = None
    _tell: list[Callable[[bool], None]] = field(default_factory=list)

    def ask(self, tell: Callable[[bool], None]) -> None:
        """Calls ``tell`` with the answer, now or later; the value has come. In the I/O thread."""
        self._tell.append(tell)
        self._answer()

    def end(self, taken: bool) -> None:
        """Notes that a task, or a thread, waits for the value no longer."""
        self.tasks -= 1
        if self._taken is None and (taken or not self.tasks):
            self._taken = taken
            self._answer()

    def _answer(self) -> None:
        if self._taken is not None:
            with contextlib.suppress(IndexError):  # another thread has told it
                self._tell.pop()(self._taken)

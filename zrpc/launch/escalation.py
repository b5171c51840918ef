"""From a gentle request to stop to force. No clock and no signals in here."""

from __future__ import annotations

import signal
from collections import deque
from dataclasses import dataclass

_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows has just one way


@dataclass(frozen=True)
class Step:
    """One thing to do to all workers that still run.

    Attributes:
        after: Seconds since the step before it.
        number: The signal to send.
        group: Whether what the workers have started gets it too.
    """

    after: float
    number: int
    group: bool


def interrupt(grace: float) -> list[Step]:
    """As Ctrl-C at a terminal, which reaches a program and what it has started."""
    return [Step(0.0, signal.SIGINT, True), *_after(grace, terminate(grace))]


def terminate(grace: float) -> list[Step]:
    """As `kill`, which reaches the program alone, so that it can wind up what it has started."""
    return [Step(0.0, signal.SIGTERM, False), *_after(grace, kill())]


def kill() -> list[Step]:
    """By force, at once."""
    return [Step(0.0, _KILL, True)]


def _after(seconds: float, steps: list[Step]) -> list[Step]:
    first, *others = steps
    return [Step(seconds, first.number, first.group), *others]


class Escalation:
    """Where a stop has got to.

    Example:
        >>> stop = Escalation(terminate(3.0), now=10.0)
        >>> [step.number.name for step in stop.due(now=10.0)], stop.next_at
        (['SIGTERM'], 13.0)
    """

    def __init__(self, steps: list[Step], now: float) -> None:
        self.began = now
        self._steps = deque(steps)
        self._at = now

    def due(self, now: float) -> list[Step]:
        """Take the steps whose time has come."""
        taken = []
        while self._steps and self.next_at <= now:
            self._at = self.next_at
            taken.append(self._steps.popleft())
        return taken

    @property
    def next_at(self) -> float:
        """When the next step is due; infinity when all are taken."""
        return self._at + self._steps[0].after if self._steps else float("inf")

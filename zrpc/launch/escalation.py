"""Stops workers in steps, from a gentle request to force. Reads no clock and sends no signal."""

from __future__ import annotations

import signal
from collections import deque
from dataclasses import dataclass, replace

_INTERRUPT_SECONDS = 3.0  # from SIGINT to SIGTERM
KILL_SECONDS = 10.0  # for killed workers to exit


@dataclass(frozen=True)
class Step:
    """A signal to send to all workers that are still running; 0 to stop waiting for them."""

    after: float  # seconds since the previous step
    number: int
    group: bool  # whether the processes that the workers have started get it too


def interrupt(grace: float) -> list[Step]:
    """Starts with SIGINT, as Ctrl-C: it reaches a program and the processes it has started.

    Within the grace period SIGTERM follows, for programs that take no notice of SIGINT.
    """
    first = _INTERRUPT_SECONDS if grace > _INTERRUPT_SECONDS else grace / 2
    return [Step(0.0, signal.SIGINT, True), *_after(first, terminate(grace - first))]


def terminate(grace: float) -> list[Step]:
    """Starts with SIGTERM, which only the program gets, so that it can stop what it started."""
    return [Step(0.0, signal.SIGTERM, False), *_after(grace, kill())]


def kill() -> list[Step]:
    """Kills at once."""
    return [Step(0.0, signal.SIGKILL, True), Step(KILL_SECONDS, 0, False)]


def _after(seconds: float, steps: list[Step]) -> list[Step]:
    return [replace(steps[0], after=seconds), *steps[1:]]


class Escalation:
    """The progress of a stop: which steps are still to be taken, and when.

    Example:
        >>> stop = Escalation(terminate(3.0), now=10.0)
        >>> [step.number.name for step in stop.due(now=10.0)], stop.next_at
        (['SIGTERM'], 13.0)
    """

    def __init__(self, steps: list[Step], now: float) -> None:
        self.started_at = now
        self._steps = deque(steps)
        self._last_at = now

    def due(self, now: float) -> list[Step]:
        """Removes and returns the steps that are due."""
        taken = []
        while self._steps and self.next_at <= now:
            self._last_at = now  # a launcher that was held up has sent nothing meanwhile
            taken.append(self._steps.popleft())
        return taken

    def postpone(self, seconds: float) -> None:
        """Takes all steps that are left later by this time."""
        self.started_at += seconds
        self._last_at += seconds

    @property
    def next_at(self) -> float:
        """The time of the next step, or infinity if none is left."""
        return self._last_at + self._steps[0].after if self._steps else float("inf")

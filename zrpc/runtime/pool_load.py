"""What a pool of threads has to do, for people."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

Job = Callable[[], None]


class Load(NamedTuple):
    """What a pool has to do.

    Attributes:
        size: the number of jobs that may run at once.
        running: the number of jobs that run, without those that wait for another worker.
        waiting: the number of jobs that wait for another worker.
        idle: the number of threads without a job.
        threads: the number of threads.
        full_for: for how many seconds some job has always waited; 0 if none waits.
        queued: the number of jobs that wait for a thread.
        backlog: the first of those.
    """

    size: int
    running: int
    waiting: int
    idle: int
    threads: int
    full_for: float
    queued: int
    backlog: list[Job]

"""How much a pool of threads has to do, for people and for warnings."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class PoolLoad(NamedTuple):
    """What a pool has to do.

    Attributes:
        size: the number of jobs that may run at once.
        running: the number of jobs that run, without those that wait for another worker.
        waiting: the number of jobs that wait for another worker.
        idle: the number of threads without a job.
        threads: the number of threads.
        full_for: for how many seconds some job has always waited; 0 if none waits.
        none_begun_for: for how many of these seconds no job was begun.
        queued: the number of jobs that wait for a thread.
        backlog: the first of those.
    """

    size: int
    running: int
    waiting: int
    idle: int
    threads: int
    full_for: float
    none_begun_for: float
    queued: int
    backlog: list[Callable[[], None]]

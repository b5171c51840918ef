"""How long the jobs of a pool run, which decides in which thread the next one runs.

The time that a job waits for another worker does not count: meanwhile, another thread takes its
place. No I/O in here, and no clock.
"""

from __future__ import annotations

# Handing a job to another thread takes 10 to 200 us: that thread must be woken, often on a core
# whose caches have cooled down, and must then get the interpreter's lock. If jobs take less than
# this, jobs that have come together run one after the other in one thread.
QUICK_JOB_SECONDS = 100e-6
# If jobs take less than this, the thread that receives runs one, unless another is running. In the
# meantime nothing is received, or another thread must take over.
_SHORT_JOB_SECONDS = 2e-3
# A longer job counts as this: it says no more about the next one.
_MAX_COUNTED_SECONDS = 20e-3
# The weight of the latest job in the moving average.
_WEIGHT_OF_LAST = 0.1


class JobTimes:
    """The moving average of how long jobs run. A lost update does no harm, so it needs no lock.

    Attributes:
        quick: whether jobs take so little time that running them side by side does not pay.
        short: whether handing a job to another thread costs more than it gains.

    Example:
        >>> times = JobTimes()
        >>> times.quick, times.short
        (True, True)
        >>> times.took(0.01)
        >>> times.quick, times.short
        (False, True)
        >>> for _ in range(10):
        ...     times.took(0.01)
        >>> times.quick, times.short
        (False, False)
    """

    __slots__ = ("_average_seconds", "quick", "short")

    def __init__(self) -> None:
        self._average_seconds = 0.0
        self.quick = self.short = True

    def overran(self) -> None:
        """Records that a job has kept the thread that receives for too long.

        It may wait in a way that is not known here. So the next jobs are handed over, some 20 at
        least, until the average says otherwise.
        """
        self._average_seconds = _MAX_COUNTED_SECONDS
        self.quick = self.short = False

    def took(self, seconds: float) -> None:
        """Records for how many seconds a job ran."""
        counted = seconds if seconds < _MAX_COUNTED_SECONDS else _MAX_COUNTED_SECONDS
        average = self._average_seconds + (counted - self._average_seconds) * _WEIGHT_OF_LAST
        self._average_seconds = average
        self.quick, self.short = average <= QUICK_JOB_SECONDS, average <= _SHORT_JOB_SECONDS

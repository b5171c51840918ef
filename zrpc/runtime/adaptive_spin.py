"""How long a waiting thread polls for a message before it sleeps.

No I/O in here. A sleeping thread must be woken when a message arrives, and often its core as well,
which takes 10 to 100 us, as long as a call does. So if messages have been arriving soon, the thread
polls (it *spins*), and yields its core between two polls. If they arrive seldom, it sleeps at once:
an idle worker takes no processor time.

If another program wants the core, it gets it with the yield, and keeps it for a time slice of some
milliseconds. A thread that sleeps is woken at once instead, as it has used less time than the
program. So if a thread has lost its core while it polled, threads sleep in place of polling for a
while. The same goes for the interpreter's lock, if another thread of this program computes.
"""

from __future__ import annotations

__all__ = ["MAX_SPIN_SECONDS", "AdaptiveSpin", "WantedCore"]

# A thread that waits for longer has spent more than a wake-up takes, and sleeps.
MAX_SPIN_SECONDS = 0.0005
# A longer wait counts as this, so one pause is soon forgotten.
_MAX_COUNTED_SECONDS = 0.003
# The weight of the latest wait in the moving average.
_WEIGHT_OF_LAST = 0.125

# A poll and a yield take some microseconds. If they take this long, something else has had the core
# for a time slice, or the interpreter's lock.
_LOST_CORE_SECONDS = 0.001
# After that, no thread polls for this time. If the core is lost again soon after, the time doubles.
_PAUSE_SECONDS = 0.01
_MAX_PAUSE_SECONDS = 1.0
_SOON_SECONDS = 0.1


class AdaptiveSpin:
    """Chooses the spins of one thread at a time.

    Attributes:
        seconds: how long to spin before the next sleep.

    Example:
        >>> spin = AdaptiveSpin()
        >>> spin.seconds
        0.0005
        >>> for _ in range(10):
        ...     spin.waited(1.0)
        >>> spin.seconds
        0.0
    """

    __slots__ = ("_average_seconds", "seconds")

    def __init__(self) -> None:
        self._average_seconds = 0.0
        self.seconds = MAX_SPIN_SECONDS

    def waited(self, seconds: float) -> None:
        """Records how long a wait took that is now over."""
        counted = seconds if seconds < _MAX_COUNTED_SECONDS else _MAX_COUNTED_SECONDS
        average = self._average_seconds + (counted - self._average_seconds) * _WEIGHT_OF_LAST
        self._average_seconds = average
        self.seconds = MAX_SPIN_SECONDS if average < MAX_SPIN_SECONDS else 0.0


class WantedCore:
    """Whether others want the core of a thread that polls. For one thread at a time.

    Times are in seconds, on any clock.

    Attributes:
        spin_from: when a thread may poll again.

    Example:
        >>> core = WantedCore()
        >>> core.polled(begun=1.0, now=1.000002), core.spin_from
        (True, 0.0)
        >>> core.polled(begun=1.1, now=1.103), round(core.spin_from, 3)
        (False, 1.113)
    """

    __slots__ = ("_pause_seconds", "spin_from")

    def __init__(self) -> None:
        self.spin_from = 0.0
        self._pause_seconds = _PAUSE_SECONDS

    def polled(self, begun: float, now: float) -> bool:
        """Records how long a poll and a yield took; returns whether the thread may go on."""
        if now - begun < _LOST_CORE_SECONDS:
            return True
        again = begun - self.spin_from < _SOON_SECONDS
        self._pause_seconds = (
            min(2 * self._pause_seconds, _MAX_PAUSE_SECONDS) if again else _PAUSE_SECONDS
        )
        self.spin_from = now + self._pause_seconds
        return False

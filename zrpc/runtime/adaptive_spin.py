"""How long a waiting thread polls for a message before it sleeps.

No I/O in here. A sleeping thread must be woken when a message arrives, and often its core as well,
which takes 10 to 100 us, as long as a call does. So if messages have been arriving soon, the thread
polls (it *spins*), and yields its core between two polls. If they arrive seldom, it sleeps at once:
an idle worker takes no processor time.

If another program wants the core, it gets it with the yield, and keeps it for a time slice of some
milliseconds. A thread that sleeps is woken at once instead, as it has used less time than the
program. So if a thread has lost its core while it polled, threads sleep in place of polling for a
while. The same goes for the interpreter's lock, if another thread of this program computes.

Even if it never loses the core, its polls count: a thread that has used up its share of a core for
which others wait is not woken at once when its message arrives, but gets its next time slice some
milliseconds later. So no thread polls while the cores are contended: more threads have wanted to
run than there are cores, at each look for a tenth of a second.
"""

from __future__ import annotations

import math

# A thread that waits for longer has spent more than a wake-up takes, and sleeps.
MAX_SPIN_SECONDS = 0.0005
# A longer wait counts as this, so one pause is soon forgotten.
_MAX_COUNTED_SECONDS = 0.003
# The weight of the latest wait in the moving average.
_WEIGHT_OF_LAST = 0.125

# Seconds between two looks at how many threads want to run. Those of a mesh alone are too many now
# and then, but seldom at this many looks in turn, with two busy workers on two cores.
_LOOK_SECONDS = 0.005
_CONTENDED_LOOKS = 20

# A poll and a yield take some microseconds. If they take this long, something else has had the core
# for a time slice, or the interpreter's lock.
_LOST_CORE_SECONDS = 0.001
# After that, no thread polls for this time. If the core is lost again soon after, the time doubles.
_PAUSE_SECONDS = 0.01
_MAX_PAUSE_SECONDS = 1.0
_SOON_SECONDS = 0.1


class AdaptiveSpin:
    """Chooses from when on a thread polls before it sleeps, for at most `MAX_SPIN_SECONDS`.

    For one thread at a time. Times are in seconds, on any clock.

    Args:
        cores: of the machine.

    Attributes:
        begins: no thread polls before this time; infinite while messages arrive seldom, or the
            cores are contended.
        next_look: when to call `looked` again.

    Example:
        >>> spin = AdaptiveSpin(cores=2)
        >>> spin.begins
        0.0
        >>> spin.polled(begun=1.0, now=1.000002)  # it may go on
        True
        >>> spin.polled(begun=1.1, now=1.103), spin.begins
        (False, 1.113)
        >>> for _ in range(10):
        ...     spin.waited(1.0)
        >>> spin.begins
        inf
    """

    __slots__ = (
        "_average_seconds",
        "_contended_looks",
        "_cores",
        "_lost_until",
        "_pause_seconds",
        "begins",
        "next_look",
    )

    def __init__(self, cores: int) -> None:
        self._cores = cores
        self.begins = self.next_look = 0.0
        self._contended_looks = 0  # the latest ones in turn
        self._average_seconds = 0.0
        self._lost_until = 0.0  # the end of the pause after the core was lost
        self._pause_seconds = _PAUSE_SECONDS

    def polled(self, begun: float, now: float) -> bool:
        """Records how long a poll and a yield took; returns whether the thread may go on."""
        if now - begun < _LOST_CORE_SECONDS:
            return True
        again = begun - self._lost_until < _SOON_SECONDS
        self._pause_seconds = (
            min(2 * self._pause_seconds, _MAX_PAUSE_SECONDS) if again else _PAUSE_SECONDS
        )
        self._lost_until = self.begins = now + self._pause_seconds
        return False

    def waited(self, seconds: float) -> None:
        """Records how long a wait took that is now over."""
        counted = seconds if seconds < _MAX_COUNTED_SECONDS else _MAX_COUNTED_SECONDS
        self._average_seconds += (counted - self._average_seconds) * _WEIGHT_OF_LAST
        seldom = self._average_seconds >= MAX_SPIN_SECONDS
        contended = self._contended_looks >= _CONTENDED_LOOKS
        self.begins = math.inf if seldom or contended else self._lost_until

    def looked(self, running: int, now: float) -> None:
        """Records how many threads of the machine run or wait for a core."""
        self.next_look = now + _LOOK_SECONDS
        self._contended_looks = self._contended_looks + 1 if running > self._cores else 0

"""How long a thread that waits for a message looks for it before it goes to sleep.

No I/O in here. A thread that sleeps has to be woken when the message comes, and often its core as
well: 10 to 100 us, as long as a call takes. So where messages have come soon of late, it looks
again and again (it *spins*), and leaves its core in between to whoever wants it. Where they come
seldom, it sleeps at once: an idle worker takes no processor time.
"""

from __future__ import annotations

__all__ = ["LONGEST_SPIN", "Spin"]

# In seconds. Who waits as long has spent more than a wake-up takes, and sleeps.
LONGEST_SPIN = 0.0005
# A wait that was longer counts as this: one pause is soon forgotten.
_LONGEST_COUNTED = 0.003
# What a single wait counts for in what is usual.
_WEIGHT = 0.125


class Spin:
    """For one thread at a time.

    Example:
        >>> spin = Spin()
        >>> spin.seconds
        0.0005
        >>> for _ in range(10):
        ...     spin.waited(1.0)
        >>> spin.seconds
        0.0
    """

    __slots__ = ("_usual",)

    def __init__(self) -> None:
        self._usual = 0.0

    @property
    def seconds(self) -> float:
        """For how long to spin before the next sleep."""
        return LONGEST_SPIN if self._usual < LONGEST_SPIN else 0.0

    def waited(self, seconds: float) -> None:
        """A wait is over, which took so long."""
        self._usual += (min(seconds, _LONGEST_COUNTED) - self._usual) * _WEIGHT

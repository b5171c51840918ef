"""How long a waiting thread polls for a message before it sleeps.

No I/O in here. A sleeping thread must be woken when a message arrives, and often its core as well,
which takes 10 to 100 us, as long as a call does. So if messages have been arriving soon, the thread
polls (it *spins*), and yields its core between two polls. If they arrive seldom, it sleeps at once:
an idle worker takes no processor time.
"""

from __future__ import annotations

__all__ = ["MAX_SPIN_SECONDS", "AdaptiveSpin"]

# A thread that waits for longer has spent more than a wake-up takes, and sleeps.
MAX_SPIN_SECONDS = 0.0005
# A longer wait counts as this, so one pause is soon forgotten.
_MAX_COUNTED_SECONDS = 0.003
# The weight of the latest wait in the moving average.
_WEIGHT_OF_LAST = 0.125


class AdaptiveSpin:
    """Chooses the spins of one thread at a time.

    Example:
        >>> spin = AdaptiveSpin()
        >>> spin.seconds
        0.0005
        >>> for _ in range(10):
        ...     spin.waited(1.0)
        >>> spin.seconds
        0.0
    """

    __slots__ = ("_average_seconds",)

    def __init__(self) -> None:
        self._average_seconds = 0.0

    @property
    def seconds(self) -> float:
        """How long to spin before the next sleep."""
        return MAX_SPIN_SECONDS if self._average_seconds < MAX_SPIN_SECONDS else 0.0

    def waited(self, seconds: float) -> None:
        """Records how long a wait took that is now over."""
        counted = seconds if seconds < _MAX_COUNTED_SECONDS else _MAX_COUNTED_SECONDS
        self._average_seconds += (counted - self._average_seconds) * _WEIGHT_OF_LAST

"""For how long nothing has come in. No I/O in here."""

from __future__ import annotations

import time

__all__ = ["Silence"]


class Silence:
    """For one thread at a time.

    Example:
        >>> Silence().lasted(received=3)
        0.0
    """

    def __init__(self) -> None:
        self._received = -1
        self._since = 0.0

    def lasted(self, received: int) -> float:
        """For how long this many messages have come in and no more, as far as was asked.

        Args:
            received: how many have ever come in.

        Returns:
            Seconds since the first call with this number.
        """
        now = time.monotonic()
        if received != self._received:
            self._received, self._since = received, now
        return now - self._since

"""Which of the reference count's messages from one sender were seen. No I/O in here."""

from __future__ import annotations

from dataclasses import dataclass, field

# A message may arrive after this many that were sent later: what was read from a connection before
# it broke can come after what the next connection brought.
_MAX_AHEAD = 1 << 14
# After this time a message that others have overtaken counts as lost.
_LATE_SECONDS = 2.0


@dataclass(slots=True)
class Serials:
    """The serial numbers seen from one sender: all below ``next``, and those in ``ahead``.

    The numbers of messages that are lost with a connection never come. They count as seen once
    `_MAX_AHEAD` later ones have come.
    """

    next: int = 0
    ahead: set[int] = field(default_factory=set)
    # The last number that was missing in `is_late`, since when, and whether that was said.
    _missing: int = -1
    _since: float = 0.0
    _said: bool = False

    def is_late(self, now: float) -> bool:
        """Returns whether the next number is late, once; it counts as seen if it stays so."""
        if not self.ahead:
            return False
        if self._missing != self.next:
            self._missing, self._since, self._said = self.next, now, False
        elif now - self._since >= _LATE_SECONDS:
            if not self._said:
                self._since, self._said = now, True
                return True
            self.next = min(self.ahead)
            self._advance()
        return False

    def seen(self, serial: int) -> bool:
        """Returns whether a number was noted."""
        return serial < self.next or serial in self.ahead

    def admit(self, serial: int) -> None:
        """Notes a number."""
        self.ahead.add(serial)
        if len(self.ahead) > _MAX_AHEAD:
            self.next = min(self.ahead)
        self._advance()

    def _advance(self) -> None:
        while self.next in self.ahead:
            self.ahead.remove(self.next)
            self.next += 1

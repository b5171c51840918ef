"""Who is told that requests have to wait for a thread: the rules. No I/O in here.

There are two places to wait at: the queue of the pool, and the event loop, whose thread a coroutine
holds up where it does not ``await``. A worker at which something has been queued, at each look, for
a while, says so to those whose requests are queued, and again while that lasts; and once more when
they are queued no longer. All times are in seconds, on one clock of the caller's that does not go
back.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from dataclasses import dataclass
from enum import IntEnum

from zrpc.errors import ProtocolError

__all__ = ["Congestion", "Place", "Report", "Reports"]

# After what time the peers are told, and how often again.
_TELL_AFTER = 1.0
_TELL_EVERY = 1.0
# What was said so long ago may not hold any more.
_FRESH = 3 * _TELL_EVERY

_REPORT = struct.Struct("<BffIII")


class Place(IntEnum):
    """Where requests wait."""

    POOL = 0
    LOOP = 1


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker says of its pool, or of its event loop.

    Attributes:
        place: of which.
        full_for: for how long requests had to wait, without a pause.
        idle_for: how long ago a request was begun, at least.
        size: how many threads may run handlers at once.
        running: how many do.
        queued: how many requests wait.
    """

    place: Place
    full_for: float
    idle_for: float
    size: int
    running: int
    queued: int

    def pack(self) -> bytes:
        """As the body of a message."""
        numbers = (self.full_for, self.idle_for, self.size, self.running, self.queued)
        return _REPORT.pack(self.place, *numbers)

    @classmethod
    def parse(cls, body: bytes) -> tuple[Place, Report | None]:
        """Reads what `pack` wrote, or the place alone, where nothing waits any more.

        Raises:
            ProtocolError: it is something else.
        """
        try:
            place = Place(body[0])
            return place, None if len(body) == 1 else cls(place, *_REPORT.unpack(body)[1:])
        except (struct.error, ValueError, IndexError) as error:
            raise ProtocolError(f"expected a report about a pool: {error}") from error

    def text(self, later: float = 0.0) -> str:
        """As a sentence, so many seconds later."""
        if self.place is Place.LOOP:
            waiting = "a coroutine waits" if self.queued == 1 else f"{self.queued} coroutines wait"
            held_up = f"its event loop has been held up for {self.full_for + later:.0f} s"
            return f"{held_up}, by a coroutine that does not `await`, and {waiting} to begin"
        threads = f"all {self.running} threads of its pool have been busy"
        if self.running == 1:
            threads = "the only thread of its pool has been busy"
        elif self.running < self.size:
            threads = f"its pool has got no thread beyond its {self.running}"
        waiting = "a request waits" if self.queued == 1 else f"{self.queued} requests wait"
        begun = ""
        if self.idle_for >= 1:
            begun = f"; none was begun for {self.idle_for + later:.0f} s"
        return f"{threads} for {self.full_for + later:.0f} s and {waiting}{begun}"


class Congestion:
    """Finds out whether requests have to wait, and who is to be told.

    Args:
        place: where they would.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._since: float | None = None
        self._begun = -1
        self._begun_at = 0.0
        self._told: set[int] = set()
        self._tell_at = 0.0

    def look(self, now: float, queued: int, begun: int) -> bool:
        """Notes how many jobs are queued, and how many were ever begun.

        Returns:
            Whether `tell` is to be called.
        """
        if begun != self._begun:
            self._begun, self._begun_at = begun, now
        if not queued:
            self._since = None
        elif self._since is None:
            self._since, self._tell_at = now, now + _TELL_AFTER
        return bool(self._told) if self._since is None else now >= self._tell_at

    def full_for(self, now: float) -> float | None:
        """For how long jobs had to wait, without a pause; None where they don't."""
        since = self._since  # another thread may ask
        return None if since is None else now - since

    def report(self, now: float, size: int, running: int, queued: int) -> Report | None:
        """What there is to say; None where that is nothing, or not worth it yet."""
        full_for = self.full_for(now)
        if full_for is None or full_for < _TELL_AFTER:
            return None
        return Report(self._place, full_for, now - self._begun_at, size, running, queued)

    def tell(self, now: float, waiting: Collection[int], report: Report | None) -> dict[int, bytes]:
        """Whom to tell what, by rank.

        Args:
            now: the time.
            waiting: the workers with requests that are queued.
            report: what there is to say.
        """
        self._tell_at = now + _TELL_EVERY
        those = set(waiting) if report is not None else set()
        said = dict.fromkeys(self._told - those, bytes([self._place]))
        if report is not None:
            said.update(dict.fromkeys(those, report.pack()))
        self._told = those
        return said


class Reports:
    """What the peers have said of themselves. Any thread may call the methods."""

    def __init__(self) -> None:
        # Single operations on the dict are atomic.
        self._reports: dict[tuple[int, Place], tuple[Report, float]] = {}

    def note(self, rank: int, place: Place, report: Report | None, now: float) -> None:
        """A peer has said something of its pool or its event loop."""
        if report is None:
            self._reports.pop((rank, place), None)
        else:
            self._reports[rank, place] = (report, now)

    def ranks(self) -> list[int]:
        """Who has said something that holds."""
        return sorted({rank for rank, _ in list(self._reports)})

    def about(self, rank: int, name: str, now: float, gone: bool) -> str:
        """What is known of a peer, as a sentence; empty for nothing."""
        found = [self._reports.get((rank, place)) for place in Place]
        texts = [self._text(*report, name, now, gone) for report in found if report is not None]
        return "; ".join(filter(None, texts))

    @staticmethod
    def _text(report: Report, at: float, name: str, now: float, gone: bool) -> str:
        if gone:
            return f"shortly before, {report.text()}" if now - at < _FRESH else ""
        if now - at < _FRESH:
            return f"{name} is alive: {report.text(now - at)}"
        return f"{now - at:.0f} s ago {name} said that {report.text()}"

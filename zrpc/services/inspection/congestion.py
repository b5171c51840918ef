"""When callers are told that their requests have to wait: the rules. No I/O here.

Requests wait in two places: in the queue of the pool, and at the event loop, whose thread is held
up by a coroutine that does not ``await``. If a worker finds something queued each time it looks,
for a while, it reports that to the callers whose requests are queued. It repeats the report while
that lasts, and sends a last one when they are queued no longer.

All times are in seconds, on one clock of the caller's that never goes back.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from enum import IntEnum
from typing import NamedTuple

from typing_extensions import Buffer

from zrpc.errors import ProtocolError
from zrpc.wire.member_id import MemberId

__all__ = ["Congestion", "Place", "Report", "Reports"]

# How long requests must have waited before their callers are told, and how often these are told
# again.
REPORT_AFTER_SECONDS = 1.0
_REPORT_EVERY_SECONDS = 1.0
# How long a report is taken to describe the present.
_FRESH_SECONDS = 3 * _REPORT_EVERY_SECONDS

_REPORT = struct.Struct("<BffIII")


class Place(IntEnum):
    """Where requests wait."""

    POOL = 0
    LOOP = 1


class Report(NamedTuple):
    """What a worker reports of its pool, or of its event loop.

    Attributes:
        place: which of the two.
        full_for: seconds for which some request has always been waiting.
        idle_for: seconds since a request was begun, at least.
        size: how many threads may run handlers at once.
        running: how many do.
        queued: how many requests wait; 0 takes back what was reported before.
    """

    place: Place
    full_for: float
    idle_for: float
    size: int
    running: int
    queued: int

    def pack(self) -> bytes:
        """Returns the report as the body of a message."""
        return _REPORT.pack(*self)

    @classmethod
    def parse(cls, body: Buffer) -> Report:
        """Reads what `pack` wrote.

        Raises:
            ProtocolError: the body is something else.
        """
        try:
            place, *numbers = _REPORT.unpack(body)
            return cls(Place(place), *numbers)
        except (struct.error, ValueError) as error:
            raise ProtocolError(f"expected a report about a pool: {error}") from error

    def text(self, later: float = 0.0) -> str:
        """Returns the report as a sentence, ``later`` seconds after it was made."""
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
    """Finds out whether requests have to wait, and which callers must be told."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._since: float | None = None
        self._begun = -1
        self._begun_at = 0.0
        self._told: set[MemberId] = set()
        self._report_at = 0.0

    def observe_queue(self, now: float, queued: int, begun: int) -> bool:
        """Records how many jobs are queued, and how many were ever begun.

        Returns whether what `reports_for` returns must be sent now.
        """
        if begun != self._begun:
            self._begun, self._begun_at = begun, now
        if not queued:
            self._since = None
        elif self._since is None:
            self._since, self._report_at = now, now + REPORT_AFTER_SECONDS
        return bool(self._told) if self._since is None else now >= self._report_at

    def full_for(self, now: float) -> float | None:
        """Returns the seconds for which some job has always been waiting; None if none waits."""
        since = self._since  # another thread may ask
        return None if since is None else now - since

    def report(self, now: float, size: int, running: int, queued: int) -> Report | None:
        """Returns what there is to report; None if no job waits, or only since a moment ago."""
        full_for = self.full_for(now)
        if full_for is None or full_for < REPORT_AFTER_SECONDS:
            return None
        return Report(self._place, full_for, now - self._begun_at, size, running, queued)

    def reports_for(
        self, now: float, waiting: Collection[MemberId], report: Report | None
    ) -> dict[MemberId, Report]:
        """Returns what to send to each member, and records that it is sent.

        The members ``waiting`` are those whose requests are queued.
        """
        self._report_at = now + _REPORT_EVERY_SECONDS
        reports = dict.fromkeys(self._told, Report(self._place, 0.0, 0.0, 0, 0, 0))
        self._told = set()
        if report is not None:
            self._told = set(waiting)
            reports |= dict.fromkeys(waiting, report)
        return reports


class Reports:
    """What the peers have reported of themselves. Any thread may call the methods."""

    def __init__(self) -> None:
        # Single operations on the dict are atomic.
        self._reports: dict[tuple[MemberId, Place], tuple[Report, float]] = {}

    def record(self, member: MemberId, report: Report, now: float) -> None:
        """Records what a peer reports of its pool or its event loop."""
        if report.queued:
            self._reports[member, report.place] = (report, now)
        else:
            self._reports.pop((member, report.place), None)

    def members(self) -> list[MemberId]:
        """Returns the members with a current report."""
        return sorted({member for member, _ in list(self._reports)})

    def describe(self, member: MemberId, name: str, now: float, gone: bool) -> str:
        """Returns what is known of a peer as a sentence; empty if nothing is known."""
        found = [self._reports.get((member, place)) for place in Place]
        texts = [self._text(*report, name, now, gone) for report in found if report is not None]
        return "; ".join(filter(None, texts))

    def _text(self, report: Report, at: float, name: str, now: float, gone: bool) -> str:
        fresh = now - at < _FRESH_SECONDS
        if gone:
            return f"shortly before, {report.text()}" if fresh else ""
        if fresh:
            return f"{name} is alive: {report.text(now - at)}"
        return f"{now - at:.0f} s ago {name} said that {report.text()}"

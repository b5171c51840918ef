"""Leaves out a part of what a worker prints if that is a flood. Does no I/O."""

from __future__ import annotations

from zrpc.launch.line_splitter import LineSplitter

_SECONDS = 1.0


class ThrottledSplitter:
    r"""A `LineSplitter` that returns a limited number of lines in each second.

    Lines above that are counted. Their number follows, as a line, when the second is over.

    Args:
        max_lines: the limit.
        max_bytes: the limit of all lines in a second. One line passes in any case.

    Example:
        >>> splitter = ThrottledSplitter(max_lines=1, max_bytes=100)
        >>> splitter.feed(b"one\ntwo\nthree\n", now=0.0), splitter.tick(now=1.0)
        ([b'one'], [b'... 2 lines left out'])
    """

    def __init__(self, max_lines: int, max_bytes: int) -> None:
        self._limits = max_lines, max_bytes
        self._splitter = LineSplitter()
        self._ends_at = float("-inf")  # of the present second
        self._lines = self._bytes = self._left_out = 0

    @property
    def due(self) -> float | None:
        """When `tick` must be called if no chunk comes before; None if it need not."""
        at = self._splitter.due
        if not self._left_out:
            return at
        return self._ends_at if at is None else min(at, self._ends_at)

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """See `LineSplitter`."""
        return self._admit(self._splitter.feed(data, now), now)

    def tick(self, now: float) -> list[bytes]:
        """See `LineSplitter`."""
        return self._admit(self._splitter.tick(now), now)

    def finish(self) -> list[bytes]:
        """See `LineSplitter`; what is unfinished is returned in any case."""
        return self._count() + self._splitter.finish()

    def _admit(self, lines: list[bytes], now: float) -> list[bytes]:
        found = []
        if now >= self._ends_at:
            found = self._count()
            self._ends_at = now + _SECONDS
            self._lines = self._bytes = 0
        max_lines, max_bytes = self._limits
        for line in lines:
            fits = self._lines < max_lines and self._bytes + len(line) <= max_bytes
            if self._left_out or not (fits or not self._lines):
                self._left_out += 1
                continue
            self._lines += 1
            self._bytes += len(line)
            found.append(line)
        return found

    def _count(self) -> list[bytes]:
        """Returns a line with the number of those left out, if there are any."""
        count, self._left_out = self._left_out, 0
        lines = "line" if count == 1 else "lines"
        return [f"... {count:,} {lines} left out".encode()] if count else []

"""Cuts a stream of bytes into the lines that are worth showing. Does no I/O."""

from __future__ import annotations

_MAX_LINE_BYTES = 1 << 20  # a longer line is shown in pieces
_REDRAW_SECONDS = 1.0  # between two states of a progress bar


class LineSplitter:
    r"""Turns chunks of output into whole lines without their ends.

    A progress bar rewrites its line after a carriage return. Until the line ends, one state a
    second is returned as a line; at its end, only the last state is.

    Example:
        >>> splitter = LineSplitter()
        >>> splitter.feed(b"one\ntw", now=0.0), splitter.feed(b"o\n", now=0.1)
        ([b'one'], [b'two'])
    """

    def __init__(self) -> None:
        self._rest = b""
        self._redrawn_at = float("-inf")

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """Adds a chunk, in any encoding that extends ASCII; returns the lines that it completes."""
        *ended, self._rest = (self._rest + data).split(b"\n")
        lines = [_last_state(line.removesuffix(b"\r")) for line in ended]
        if b"\r" in self._rest:
            lines += self._redraw(now)
        if len(self._rest) > _MAX_LINE_BYTES:
            lines.append(self.finish()[0])
        return lines

    def finish(self) -> list[bytes]:
        """Returns the last line of a stream that didn't end with a line end."""
        rest, self._rest = self._rest, b""
        return [_last_state(rest)] if rest.strip(b"\r") else []

    def _redraw(self, now: float) -> list[bytes]:
        # A return at the very end may be half of a "\r\n", so it waits for the next byte.
        open_end = b"\r" if self._rest.endswith(b"\r") else b""
        *states, newest = self._rest.removesuffix(b"\r").split(b"\r")
        shown = [state for state in states if state.strip()][-1:]
        if not shown:
            return []
        if now - self._redrawn_at >= _REDRAW_SECONDS:
            self._redrawn_at = now
        else:
            shown = []
        self._rest = b"\r" + newest + open_end
        return shown


def _last_state(line: bytes) -> bytes:
    """Returns roughly what a terminal would show of a line with carriage returns in it."""
    if b"\r" not in line:
        return line
    states = [state for state in line.split(b"\r") if state.strip()]
    return states[-1] if states else b""

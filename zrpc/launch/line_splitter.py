"""Cuts what a program writes for a terminal into the lines that are worth showing. Does no I/O."""

from __future__ import annotations

import re
import threading

_MAX_LINE_BYTES = 16 << 20  # a longer line is shown in pieces
_REDRAW_SECONDS = 1.0  # between two states of a progress bar
_MAX_SEQUENCE_BYTES = 64  # a longer one is no control sequence
_MAX_ROWS_UP = 200  # more than a terminal has
_MAX_SPACES = 200
_ROW_BYTES = 100  # of memory that a row takes besides its text
_MAX_BACKSPACED_BYTES = 4096  # of a line whose state before a backspace is kept

# All that moves the cursor or has another effect on a terminal than to show a character. It begins
# with one of the first: a search for these alone is several times faster.
_FIRST = re.compile(rb"[\r\b\x0b\x0c\x0e\x0f\x1b]")
_CONTROL = re.compile(
    rb"\r{1,2}\n"
    rb"|\x1b\[(?P<numbers>[0-?]*)[ -/]*(?P<final>[@-~])"
    rb"|(?P<string>\x1b[\]PX^_])"  # such as a window's title; the text follows
    rb"|\x1b[ -/]*(?P<escape>[0-~])"
    rb"|[\r\b\x0b\x0c\x0e\x0f\x1b]"
)
_UNFINISHED = re.compile(rb"(?:\r{1,2}|\x1b(?:\[[0-?]*[ -/]*|[ -/]*))\Z")
_END_OF_STRING = re.compile(rb"\x07|\x1b\\|(?=[\x18\x1a\n\x1b])")
_COLOUR = re.compile(rb"\x1b\[[0-9:;]*m")
_INVISIBLE = re.compile(rb"\s+|" + _COLOUR.pattern)


class LineSplitter:
    r"""Turns chunks of output into whole lines without their ends.

    Colours are kept. All other control sequences are followed, as far as they matter, and left
    out: they would move the cursor into lines of other workers.

    A progress bar rewrites its line after a carriage return, or after the cursor has moved up to
    it. Of what is rewritten, one state a second is returned as a line. The last state is always
    returned: at the end of the line, by `tick`, or by `finish`.

    Attributes:
        due: When `tick` must be called if no chunk comes before; None if it need not.

    Example:
        >>> splitter = LineSplitter()
        >>> splitter.feed(b"one\ntw", now=0.0), splitter.feed(b"o\n", now=0.1)
        ([b'one'], [b'two'])
    """

    def __init__(self) -> None:
        self.due: float | None = None
        self._lines: list[bytes] = []  # to be returned
        self._unread = b""  # the beginning of a control sequence
        self._in_string = False
        # Rows as on a terminal. The cursor is in `_row`; no row below `_bottom` was ever reached.
        self._row = self._bottom = 0
        self._states: dict[int, bytes] = {}  # the last whole one of each row, if not returned yet
        # Of the cursor's row: what was written since its state; whether that was returned; whether
        # the row was reached before, or rewritten.
        self._text = bytearray()
        self._returned = False
        self._rewritten = False
        self._backspaces = 0
        self._redrawn_at = float("-inf")

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """Adds a chunk, in any encoding that extends ASCII; returns the lines that it completes."""
        self._read(self._unread + data)
        if now - self._redrawn_at >= _REDRAW_SECONDS or self._has_much():
            self._redraw(now)
        # A return at the end may be half of a line's end.
        returned = self._unread.startswith(b"\r") or self._rewritten
        if not (self._states or (returned and self._is_new())):
            self.due = None
        elif self.due is None:
            self.due = max(now, self._redrawn_at) + _REDRAW_SECONDS
        return self._take()

    def _has_much(self) -> bool:
        return sum(_ROW_BYTES + len(state) for state in self._states.values()) > _MAX_LINE_BYTES

    def tick(self, now: float) -> list[bytes]:
        """Returns the latest states of what was rewritten, finished or not."""
        if self._unread.startswith(b"\r"):
            self._unread = b""
            self._begin_state()
        if self._rewritten and self._is_new():
            self._states[self._row] = bytes(self._text)
            self._returned = True  # what is added to it comes with it again
        self._redraw(now)
        self.due = None
        return self._take()

    def finish(self) -> list[bytes]:
        """Returns what is left at the end of the stream."""
        self._rewritten = True
        return self.tick(0.0)

    def _take(self) -> list[bytes]:
        lines, self._lines = self._lines, []
        return lines

    def _read(self, data: bytes) -> None:
        self._unread = b""
        at = 0
        while True:
            if self._in_string:
                end = _END_OF_STRING.search(data, at)
                if end is None:
                    return
                self._in_string, at = False, end.end()
            first = _FIRST.search(data, at)
            if first is None:
                self._write(data[at:] if at else data)
                return
            self._write(data[at : first.start()])
            at = first.start()
            if len(data) - at <= _MAX_SEQUENCE_BYTES and _UNFINISHED.match(data, at):
                self._unread = data[at:]
                return
            control = _CONTROL.match(data, at)
            assert control is not None
            self._follow(control)
            at = control.end()

    def _follow(self, control: re.Match[bytes]) -> None:
        """Does what a control character or sequence asks for."""
        if control["final"]:
            self._follow_sequence(control[0], control["numbers"], control["final"])
        elif control["string"]:
            self._in_string = True
        elif control["escape"]:
            if control["escape"] == b"M":
                self._move(-1)
            elif control["escape"] in b"DE":
                self._end_line()
            elif control["escape"] == b"8":
                self._go_elsewhere()
        elif control[0].endswith(b"\n"):
            self._end_line()
        elif control[0] == b"\r":
            self._begin_state()
        elif control[0] == b"\b":
            self._backspaces += 1

    def _follow_sequence(self, sequence: bytes, numbers: bytes, final: bytes) -> None:
        # Python refuses thousands of digits; a count of nine exceeds all limits below.
        count = int(numbers[:9]) if numbers.isdigit() else 1
        if _COLOUR.fullmatch(sequence):
            self._append(sequence)
        elif final in b"AF":
            self._move(-min(max(count, 1), _MAX_ROWS_UP))
        elif final in b"BE":
            self._move(min(max(count, 1), _MAX_ROWS_UP))
        elif final == b"C":
            self._append(b" " * min(count, _MAX_SPACES))
        elif final == b"D":
            self._backspaces += count
        elif final in b"Hfu":
            self._go_elsewhere()
        elif (final == b"G" and count <= 1) or (final == b"K" and numbers in (b"1", b"2")):
            self._begin_state()

    def _write(self, text: bytes) -> None:
        first, *others = text.split(b"\n")
        self._append(first)
        if not others:
            return
        self._end_line()
        last = others.pop()
        if not self._rewritten and not self._states:
            self._lines += others  # most output, quickly
            self._row = self._bottom = self._row + len(others)
        else:
            for line in others:
                self._append(line)
                self._end_line()
        self._append(last)

    def _append(self, text: bytes) -> None:
        if not text:
            return
        if self._backspaces:
            self._go_back()
        self._text += text
        self._returned = False
        while len(self._text) > _MAX_LINE_BYTES:
            self._lines.append(bytes(self._text[:_MAX_LINE_BYTES]))
            del self._text[:_MAX_LINE_BYTES]

    def _go_back(self) -> None:
        """Removes the characters that are written over after backspaces."""
        count, self._backspaces = self._backspaces, 0
        if len(self._text) <= _MAX_BACKSPACED_BYTES:
            self._keep_state()
        self._rewritten = True
        at = len(self._text)
        while count and at:
            at -= 1
            count -= self._text[at] & 0xC0 != 0x80  # not within a character of UTF-8
        del self._text[at:]

    def _begin_state(self) -> None:
        """Goes to the start of the row, over which the text that follows is written."""
        self._keep_state()
        self._text.clear()
        self._rewritten = True

    def _keep_state(self) -> None:
        self._backspaces = 0
        if self._is_new():
            self._states[self._row] = bytes(self._text)

    def _is_new(self) -> bool:
        """Whether the row has text to be seen that was not returned yet."""
        if self._returned:
            return False
        at = 0
        while found := _INVISIBLE.match(self._text, at):
            at = found.end()
        return at < len(self._text)

    def _end_line(self) -> None:
        line: bytes | None = bytes(self._text)
        if self._rewritten:
            self._keep_state()
            line = self._states.pop(self._row, None)
        if line is not None and self._row == self._bottom and not self._states:
            self._lines.append(line)
        elif line:
            self._states[self._row] = line
        self._enter(self._row + 1)

    def _move(self, rows: int) -> None:
        self._keep_state()
        self._enter(self._row + rows)

    def _go_elsewhere(self) -> None:
        """Goes to an unknown row, which counts as a new one."""
        if self._is_new() or self._row in self._states:
            self._move(self._bottom + 1 - self._row)

    def _enter(self, row: int) -> None:
        self._row = row
        self._rewritten = row <= self._bottom
        self._bottom = max(self._bottom, row)
        self._text.clear()
        self._returned = False
        self._backspaces = 0

    def _redraw(self, now: float) -> None:
        """Returns the whole states of all rows, from top to bottom."""
        if self._states:
            self._lines += [state for _, state in sorted(self._states.items())]
            self._states.clear()
            self._redrawn_at = now
            self.due = None


_SECONDS = 1.0


class LineBudget:
    """A number of lines and bytes in each second, which several streams share. Thread-safe."""

    def __init__(self, max_lines: int, max_bytes: int) -> None:
        self._limits = max_lines, max_bytes
        self._lock = threading.Lock()  # guards the rest; nothing else is taken while it is held
        self._ends_at = float("-inf")  # of the present second
        self._lines = self._bytes = 0

    def take(self, size: int, now: float) -> bool:
        """Takes a line of a size, unless there is no room for it in this second."""
        with self._lock:
            if now >= self._ends_at:
                self._ends_at = now + _SECONDS
                self._lines = self._bytes = 0
            max_lines, max_bytes = self._limits
            if self._lines >= max_lines or self._bytes + size > max_bytes:
                return False
            self._lines += 1
            self._bytes += size
            return True


class ThrottledSplitter:
    r"""A `LineSplitter` that returns a limited number of lines in each second.

    Lines above that are counted. Their number follows, as a line, when the second is over.

    Args:
        max_lines: the limit.
        max_bytes: the limit of all lines in a second. One line passes in any case.
        shared: what lines above these limits are taken from.

    Example:
        >>> splitter = ThrottledSplitter(max_lines=1, max_bytes=100)
        >>> splitter.feed(b"one\ntwo\nthree\n", now=0.0), splitter.tick(now=1.0)
        ([b'one'], [b'... 2 lines left out'])
    """

    def __init__(self, max_lines: int, max_bytes: int, shared: LineBudget | None = None) -> None:
        self._limits = max_lines, max_bytes
        self._shared = shared
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
            if not self._left_out and (fits or not self._lines):
                self._lines += 1
                self._bytes += len(line)
                found.append(line)
            elif not self._left_out and self._shared and self._shared.take(len(line), now):
                found.append(line)
            else:
                self._left_out += 1
        return found

    def _count(self) -> list[bytes]:
        """Returns a line with the number of those left out, if there are any."""
        count, self._left_out = self._left_out, 0
        lines = "line" if count == 1 else "lines"
        return [f"... {count:,} {lines} left out".encode()] if count else []

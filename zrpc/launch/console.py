"""The launcher's own standard output and error, shared by all workers' lines."""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Callable, Sequence

_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)  # no red: that reads as an error
_RESET = b"\x1b[0m"


class Console:
    """Writes whole lines with their rank, in a colour per rank on a terminal.

    Thread-safe.

    Args:
        stdout: Descriptor for what workers write to standard output.
        stderr: Descriptor for what they write to standard error, and for notices.
        on_closed: Called once, from any thread, when a reader of either has gone away.

    Attributes:
        closed: Whether the reader of either has gone away.
        blocked: Whether a write is under way; a reader that is slow makes it last.
    """

    def __init__(
        self, stdout: int = 1, stderr: int = 2, on_closed: Callable[[], None] = lambda: None
    ) -> None:
        self.closed = False
        self.blocked = False
        self._fds = (stdout, stderr)
        self._colours = tuple(_wants_colour(fd) for fd in self._fds)
        self._on_closed = on_closed
        self._lock = threading.Lock()  # held over each write, so that lines stay whole
        self._gone: set[int] = set()

    def show(self, rank: int, lines: Sequence[bytes], *, error: bool) -> None:
        """Write a worker's lines.

        Args:
            rank: The worker.
            lines: Its lines, without their ends.
            error: Whether they came from its standard error.
        """
        prefix = f"[{rank}] ".encode()
        if self._colours[error]:
            prefix = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m[{rank}]".encode() + _RESET + b" "
            # A colour that a worker leaves switched on must not run into others' lines.
            lines = [line + _RESET if b"\x1b[" in line else line for line in lines]
        self._write(error, b"".join(prefix + line + b"\n" for line in lines))

    def notice(self, text: str) -> None:
        """Write lines of the launcher itself, without a rank, to standard error."""
        self._write(True, (text + "\n").encode(errors="backslashreplace"))

    def raw(self, lines: Sequence[bytes]) -> None:
        """Write lines to standard error just as they are."""
        self._write(True, b"".join(line + b"\n" for line in lines))

    def _write(self, error: bool, data: bytes) -> None:
        fd = self._fds[error]
        with self._lock:
            self.blocked = True
            try:
                while data and fd not in self._gone:
                    data = data[_write_some(fd, data) :]
                return
            except OSError:  # the pipe's reader or the terminal is gone
                self._gone.add(fd)
                self.closed = True
            finally:
                self.blocked = False
        self._on_closed()


def _write_some(fd: int, data: bytes) -> int:
    try:
        return os.write(fd, data)
    except BlockingIOError:  # some other process has made the shared file non-blocking
        select.select([], [fd], [], 1.0)
        return 0


def _wants_colour(fd: int) -> bool:
    try:
        terminal = os.isatty(fd)
    except OSError:
        return False
    return terminal and not refuses_colours() and sys.platform != "win32"


def refuses_colours() -> bool:
    """Whether the environment asks for plain text: https://no-color.org, or a simple terminal."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"

"""The launcher's own standard output and error, shared by all workers' lines."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence

from zrpc.launch.descriptors import writable

_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)  # no red: that reads as an error
_RESET = b"\x1b[0m"


class Console:
    """Writes whole lines with their rank, in a colour per rank on a terminal.

    Thread-safe.

    Args:
        stdout: Descriptor for what workers write to standard output.
        stderr: Descriptor for what they write to standard error, and for notices.
        on_closed: Called once, from any thread, when the reader of either has gone away.
        labels: What each rank's lines begin with; none for the ranks themselves.

    Attributes:
        trouble: Why nothing more can be written to one of them, for the user; or empty.
        blocked: Whether a write is in progress. A slow reader makes it last.
    """

    def __init__(
        self,
        stdout: int = 1,
        stderr: int = 2,
        on_closed: Callable[[], None] = lambda: None,
        labels: Sequence[str] = (),
    ) -> None:
        self.trouble = ""
        self.blocked = False
        self._fds = (stdout, stderr)
        self._colours = tuple(_wants_colour(fd) for fd in self._fds)
        self._on_closed = on_closed
        self._labels = labels
        self._lock = threading.Lock()  # held over each write, so that lines stay whole
        self._closed_fds: set[int] = set()

    def show(self, rank: int, lines: Sequence[bytes], *, error: bool) -> None:
        """Writes a worker's lines, without line ends, from its standard output or error."""
        label = f"[{self._labels[rank] if self._labels else rank}]".encode()
        prefix = label + b" "
        if self._colours[error]:
            prefix = b"\x1b[%dm%b%b " % (_COLOURS[rank % len(_COLOURS)], label, _RESET)
            # A colour that a worker leaves switched on must not affect other workers' lines.
            lines = [line + _RESET if b"\x1b[" in line else line for line in lines]
        self._write(error, b"".join(prefix + line + b"\n" for line in lines))

    def notice(self, *lines: bytes) -> None:
        """Writes lines without a rank to standard error."""
        self._write(True, b"".join(line + b"\n" for line in lines))

    def _write(self, error: bool, data: bytes) -> None:
        fd = self._fds[error]
        with self._lock:
            self.blocked = True
            try:
                while data and fd not in self._closed_fds:
                    data = data[_write_some(fd, data) :]
                return
            except OSError as error:
                self._closed_fds.add(fd)
                self.trouble = f"can't be written ({error.strerror})"
                if error.errno in (errno.EPIPE, errno.EIO):  # or the terminal is gone
                    self.trouble = "was closed by its reader"
            finally:
                self.blocked = False
        self._on_closed()


def _write_some(fd: int, data: bytes) -> int:
    try:
        return os.write(fd, data)
    except BlockingIOError:  # another process has made the shared file non-blocking
        writable(fd, timeout=1.0)
        return 0


def _wants_colour(fd: int) -> bool:
    return os.isatty(fd) and not refuses_colours()


def refuses_colours() -> bool:
    """Returns whether the environment asks for plain text, by https://no-color.org or TERM=dumb."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"

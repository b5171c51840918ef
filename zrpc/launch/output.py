"""Reads the workers' output from pipes, keeps it in log files, and shows it with the rank."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from zrpc.launch.descriptors import readable, writable
from zrpc.launch.errors import LaunchError
from zrpc.launch.line_splitter import LineSplitter, ThrottledSplitter

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
        self._colours = tuple(os.isatty(fd) and not refuses_colours() for fd in self._fds)
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


def refuses_colours() -> bool:
    """Returns whether the environment asks for plain text, by https://no-color.org or TERM=dumb."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


# Of each worker's standard error, kept for a report of its failure; the last line always is.
_MAX_TAIL_LINES = 400
_MAX_TAIL_BYTES = 1 << 20
_TRACEBACK = b"Traceback (most recent call last):"
_CHAINED = (b"During handling of the above exception", b"The above exception was the direct cause")


class Output:
    """Forwards the output of all workers, with a thread per stream.

    Args:
        console: Shows them.
        log_dir: The directory in which each worker's output is kept unchanged, in ``rank0.out``
            and ``rank0.err``, that after its first restart in ``rank0.1.out`` and so on; None to
            keep none. It is created, and files with such names in it are removed. The workers'
            output is always added at the ends of the files, so that another program may empty them.
        make_splitter: Makes what cuts a stream into the lines to show.

    Raises:
        LaunchError: The directory can't be created.
    """

    def __init__(
        self,
        console: Console,
        log_dir: Path | None = None,
        make_splitter: Callable[[], LineSplitter | ThrottledSplitter] = LineSplitter,
    ) -> None:
        self._console = console
        self._log_dir = log_dir
        self._make_splitter = make_splitter
        self._streams: list[_Stream] = []
        self._notices: BinaryIO | None = None  # the pipe of notices, which is shown as a stream is
        # The second is closed by `drain`. Each stream's thread waits for its pipe or for that.
        self._finished, self._unfinished = socket.socketpair()
        if log_dir is not None:
            try:
                log_dir.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise LaunchError(
                    f"the log directory {log_dir} can't be created: {error.strerror}"
                ) from error

    @contextlib.contextmanager
    def open(self, rank: int, restarts: int = 0) -> Iterator[tuple[int, int]]:
        """Creates the pipes of one worker; yields descriptors for its standard output and error.

        They are closed at the end of the block, in which the worker gets copies.
        """
        name = f"rank{rank}.{restarts}" if restarts else f"rank{rank}"
        if self._log_dir is not None and not restarts:  # or an earlier launch's would mislead
            for path in self._log_dir.glob(f"rank{rank}.*[0-9].*"):
                path.unlink()
        fds = self._open(rank, f"{name}.out", error=False), self._open(rank, f"{name}.err")
        try:
            yield fds
        finally:
            for fd in fds:
                os.close(fd)

    def _open(self, rank: int | None, name: str, error: bool = True) -> int:
        log: BinaryIO | None = None
        if self._log_dir is not None and rank is not None:
            log = open(self._log_dir / name, "ab", buffering=0)  # noqa: SIM115
            with contextlib.suppress(OSError):  # a device
                log.truncate(0)
        reading, writing = os.pipe()
        splitter = self._make_splitter()
        done = self._finished.fileno()
        stream = _Stream(reading, rank, error, self._console, log, done, splitter)
        # A daemon, so that a process that escaped with the pipe can't keep the launcher alive.
        stream.thread = threading.Thread(target=stream.run, name=f"zrpc-output-{name}", daemon=True)
        stream.thread.start()
        self._streams.append(stream)
        return writing

    def notice(self, text: str) -> None:
        """Shows lines of the launcher itself, without waiting for a slow reader."""
        if self._notices is None:
            self._notices = open(self._open(None, "notices"), "wb", buffering=0)  # noqa: SIM115
            os.set_blocking(self._notices.fileno(), False)  # after thousands, others are dropped
        self._notices.write((text + "\n").encode(errors="backslashreplace"))

    def error_tail(self, rank: int) -> list[bytes]:
        """Returns the last traceback in a worker's standard error, or else its last lines."""
        [*_, last] = (each for each in self._streams if each.rank == rank and each.error)
        return last_traceback(list(last.tail))

    def drain(self, timeout: float, cancelled: Callable[[], bool] = lambda: False) -> bool:
        """Ends each stream as soon as its pipe is empty, and waits until all of it was shown.

        For when all workers have exited: other processes may hold their pipes open without limit.
        Returns whether all streams have ended. A stray process may write for ``timeout`` seconds.
        Time in which a slow reader of the launcher's own output blocks it doesn't count.
        ``cancelled`` is polled: the wait ends when it returns true.
        """
        deadline = time.monotonic() + timeout
        self._unfinished.close()
        if self._notices is not None:
            self._notices.close()
        for stream in self._streams:
            while stream.thread.is_alive():
                stream.thread.join(0.05)
                if self._console.blocked:
                    deadline = time.monotonic() + timeout
                if time.monotonic() > deadline or cancelled():
                    return False
        self._finished.close()
        return True


@dataclass(eq=False)
class _Stream:
    """One pipe."""

    _fd: int
    rank: int | None  # None for the launcher itself
    error: bool
    _console: Console
    _log: BinaryIO | None
    _finished: int
    _splitter: LineSplitter | ThrottledSplitter
    tail: deque[bytes] = field(default_factory=lambda: deque(maxlen=_MAX_TAIL_LINES))
    thread: threading.Thread = field(init=False)

    def run(self) -> None:
        """Reads the pipe until it ends. For its thread."""
        try:
            while data := self._next():
                self._keep(data)
                self._show(self._splitter.feed(data, time.monotonic()))
            self._show(self._splitter.finish())
        finally:
            os.close(self._fd)
            if self._log is not None:
                self._log.close()

    def _next(self) -> bytes:
        """Waits for output, and shows meanwhile what is due; returns nothing at the end."""
        ready: set[int] = set()
        while not ready:
            due = self._splitter.due
            seconds = None if due is None else max(0.0, due - time.monotonic())
            ready = readable(self._fd, self._finished, timeout=seconds)
            if not ready:
                self._show(self._splitter.tick(time.monotonic()))
        return os.read(self._fd, 65536) if self._fd in ready else b""

    def _keep(self, data: bytes) -> None:
        if self._log is None:
            return
        try:
            self._log.write(data)
        except OSError as error:  # a full disk must not stop the training
            text = f"zrpc launch: {self._log.name}: {error}; no longer kept"
            self._console.notice(text.encode(errors="backslashreplace"))
            with contextlib.suppress(OSError):
                self._log.close()
            self._log = None

    def _show(self, lines: list[bytes]) -> None:
        if self.rank is None:
            self._console.notice(*lines)
            return
        if self.error:
            self.tail.extend(lines)
            while len(self.tail) > 1 and sum(map(len, self.tail)) > _MAX_TAIL_BYTES:
                self.tail.popleft()
        self._console.show(self.rank, lines, error=self.error)


def last_traceback(lines: list[bytes]) -> list[bytes]:
    """Returns the last traceback and those chained to it, or the last 20 lines if there is none."""
    starts = [i for i, line in enumerate(lines) if line.lstrip(b" +").startswith(_TRACEBACK)]
    if not starts:
        return lines[-20:]
    first = starts.pop()
    while starts and any(line.startswith(_CHAINED) for line in lines[starts[-1] : first]):
        first = starts.pop()
    return lines[first:]

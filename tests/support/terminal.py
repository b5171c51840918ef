"""A program on a pseudo-terminal, as a user at a keyboard sees it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.warm import FOREGROUND, warm_commands

DEADLINE = 60.0
_ROWS, _COLUMNS = 40, 160


class TerminalProgram:
    """A program that has a pseudo-terminal of its own, and is in its foreground.

    Args:
        command: what follows ``python``.
        cwd: the working directory.
        cold: whether it has an interpreter of its own, and is not forked with torch.
    """

    def __init__(self, command: Sequence[str], cwd: Path, cold: bool = False) -> None:
        python = [sys.executable, "-c", _IN_FOREGROUND] if cold else [warm_commands().python]
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", _ROWS, _COLUMNS, 0, 0))
        self._slave = slave  # kept open, to look at its modes at the end
        self._modes: Any = termios.tcgetattr(slave)
        self.process = subprocess.Popen(
            [*python, *command],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=cwd,
            env={**os.environ, "TERM": "xterm", FOREGROUND: "1"},
            start_new_session=True,
        )
        self.seen = ""
        self._read = 0

    def read_until(self, text: str) -> str:
        """Returns what is shown from the last call on, up to a text."""
        deadline = time.monotonic() + DEADLINE
        while (at := self.seen.find(text, self._read)) < 0:
            self._read_more(text, deadline)
        begun, self._read = self._read, at + len(text)
        return self.seen[begun : self._read]

    def await_text(self, text: str) -> None:
        """Waits until a text has been shown; the next `read_until` returns it, too."""
        deadline = time.monotonic() + DEADLINE
        while text not in self.seen:
            self._read_more(text, deadline)

    def _read_more(self, text: str, deadline: float) -> None:
        ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"no {text!r} in time, but {self.seen}"
        self.seen += os.read(self._master, 65536).decode(errors="replace")

    def type(self, text: str) -> None:
        """Types a text; ``\\x03`` is Ctrl-C."""
        os.write(self._master, text.encode())

    def echoes(self) -> bool:
        """Returns whether the terminal shows what is typed."""
        modes: Any = termios.tcgetattr(self._slave)
        return bool(modes[3] & termios.ECHO)

    def finish(self) -> int:
        """Waits for the end; returns the exit code. The terminal must be as it was."""
        deadline = time.monotonic() + DEADLINE
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.seen
            if select.select([self._master], [], [], 0.05)[0]:
                self.seen += os.read(self._master, 65536).decode(errors="replace")
        while select.select([self._master], [], [], 0)[0]:
            self.seen += os.read(self._master, 65536).decode(errors="replace")
        assert termios.tcgetattr(self._slave) == self._modes
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for fd in (self._master, self._slave):
            with contextlib.suppress(OSError):
                os.close(fd)


_IN_FOREGROUND = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""

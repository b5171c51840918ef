"""Carries what is typed at the launcher's terminal to one worker, only in the foreground.

Workers have sessions of their own, so the system lets them read the launcher's terminal at any
time. In the background, or while the launcher is suspended, they would get what is meant for the
shell or for another program. So the worker gets a pseudo-terminal, and the launcher reads.

It reads only once the worker wants input. Otherwise what is typed stays with the terminal, for the
shell that comes after the launch. A worker wants input if its program uses ``sys.stdin`` (see
`RelayedInput`), or if one of its processes is found waiting to read that pseudo-terminal.

If the program switches off the echo of its terminal, as getpass does, or reads single characters,
the launcher's terminal is set to the same, and back in time.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import platform
import select
import termios
import threading
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["RelayedInput", "TerminalInput", "may_read_directly", "must_relay"]

_STDIN = 0
_FLAGS = 3  # of what tcgetattr returns: the local modes
_CHARACTERS = 6
_MIRRORED = termios.ECHO | termios.ECHONL | termios.ICANON
_MIRROR_SECONDS = 0.1  # faster than somebody types after a prompt
_BACKGROUND_SECONDS = 0.5  # `fg` of a running job sends no signal
_UNWANTED_SECONDS = 0.2  # until a worker that did not want input is looked at again
_DEV_TTY = os.makedev(5, 0)
_READ_CALLS = {"x86_64": "0", "aarch64": "63"}  # the number of the system call


def must_relay() -> bool:
    """Returns whether standard input is the terminal of this process's session."""
    try:
        return os.tcgetpgrp(_STDIN) >= 0
    except OSError:
        return False


def may_read_directly() -> bool:
    """Returns whether a worker may have this process's standard input itself.

    It may unless that is the terminal of another session, whose shell reads it: see setsid(1).
    """
    if not os.isatty(_STDIN):
        return True
    device = os.fstat(_STDIN).st_rdev
    # /dev/tty is the terminal of the session in which it was opened, and that isn't this one.
    return device != _DEV_TTY and all(found != device for found in _terminals())


def _terminals() -> Iterator[int]:
    """Yields the device numbers of the terminals that processes are controlled by."""
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{int(name)}/stat") as file:
                # The name before the fields may hold spaces and parentheses.
                number = int(file.read().rpartition(")")[2].split()[4])
            yield os.makedev(number >> 8 & 0xFFF, number & 0xFF | number >> 12 & 0xFFF00)


class RelayedInput(io.FileIO):
    """A worker's standard input, which asks the launcher for it when it is first used."""

    _asked = False

    def _ask(self) -> None:
        if not self._asked:
            self._asked = True
            with contextlib.suppress(OSError):
                os.write(super().fileno(), b"\n")

    def fileno(self) -> int:
        """Returns the descriptor, which the program may read or wait for."""
        self._ask()
        return super().fileno()

    def readinto(self, buffer: Any) -> int | None:
        """Reads into a buffer."""
        self._ask()
        return super().readinto(buffer)

    def readall(self) -> bytes:
        """Reads up to the end of the file."""
        self._ask()
        return super().readall()

    def read(self, size: int | None = -1, /) -> bytes:
        """Reads at most some bytes."""
        self._ask()
        return super().read(-1 if size is None else size)


class TerminalInput:
    """Serves one worker. A thread of it reads the terminal.

    Args:
        busy: Says whether something else reads the terminal, such as a debugger's prompt.
        on_waiting: Called, once, when the worker wants input and this process is in the background.

    Attributes:
        fd: The worker's standard input.
        pid: The worker's process, once it is served.

    Raises:
        OSError: There is no pseudo-terminal.
    """

    def __init__(self, busy: Callable[[], bool], on_waiting: Callable[[], None]) -> None:
        self.pid = 0
        self._busy = busy
        self._on_waiting = on_waiting
        # Not descriptor 0, since others that have that open wait when they read.
        self._terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK)
        self._master, self.fd = os.openpty()
        self._name = os.ttyname(self.fd)
        os.set_blocking(self._master, False)
        self._closing, self._close = os.pipe()
        # Guards the modes of the launcher's terminal: what to restore, and whether it is paused.
        self._lock = threading.Lock()
        self._restored: list[Any] | None = None
        self._paused = False
        self._asked = False
        self._unsent = b""
        self._thread = threading.Thread(target=self._relay, name="zrpc-input", daemon=True)
        modes = termios.tcgetattr(self._terminal)
        modes[_FLAGS] &= ~termios.ISIG  # Ctrl-C is for the launcher
        termios.tcsetattr(self.fd, termios.TCSANOW, modes)
        self.resize()

    def serve(self, pid: int) -> None:
        """Begins to carry input to a process, which has the descriptor."""
        self.pid = pid
        self._thread.start()

    def resize(self) -> None:
        """Gives the worker's terminal the size of the launcher's."""
        size = fcntl.ioctl(self._terminal, termios.TIOCGWINSZ, bytes(8))
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, size)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Restores the modes of the launcher's terminal, and leaves it alone within the block."""
        self._pause()
        try:
            yield
        finally:
            with self._lock:
                self._paused = False

    def _pause(self) -> None:
        with self._lock, contextlib.suppress(OSError, termios.error):
            restored, self._restored = self._restored, None
            if restored is not None and self._in_foreground():
                termios.tcsetattr(self._terminal, termios.TCSANOW, restored)
            self._paused = True

    def close(self) -> None:
        """Ends the thread, and restores the modes of the launcher's terminal. Idempotent."""
        if self._close < 0:
            return
        self._pause()
        os.close(self._close)
        self._close = -1
        if self._thread.ident is not None:
            self._thread.join()
        for fd in (self._terminal, self._master, self.fd, self._closing):
            os.close(fd)

    def _in_foreground(self) -> bool:
        return not self._paused and self._has_terminal()

    def _in_background(self) -> bool:
        return not self._paused and not self._has_terminal()

    def _has_terminal(self) -> bool:
        try:
            return os.tcgetpgrp(self._terminal) == os.getpgrp()
        except OSError:
            return False

    # -- in the thread -------------------------------------------------------------------

    def _relay(self) -> None:
        unwanted = False  # whether there is input that the worker did not want a moment ago
        waiting = False
        while True:
            here = self._in_foreground() and not self._busy()
            poll = select.poll()
            poll.register(self._closing, select.POLLIN)
            poll.register(self._master, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            if here and not self._unsent and not unwanted:
                poll.register(self._terminal, select.POLLIN)
            events = dict(poll.poll(self._pause_ms(here, unwanted)))
            if self._closing in events:
                return
            if events.get(self._master, 0) & select.POLLIN:  # the worker asks, or echoes input
                self._asked = True
                with contextlib.suppress(OSError):
                    os.read(self._master, 65536)
            unwanted = False
            if self._terminal in events:
                self._asked = self._asked or self._is_awaited()
                unwanted = not self._asked
                if self._asked and self._in_foreground() and not self._read():
                    return
            if self._unsent:
                with contextlib.suppress(BlockingIOError):
                    self._unsent = self._unsent[os.write(self._master, self._unsent) :]
            if self._asked and here:
                self._mirror_modes()
            if self._asked and not waiting and self._in_background() and not self._busy():
                waiting = True
                self._on_waiting()

    def _pause_ms(self, here: bool, unwanted: bool) -> int | None:
        if not here:
            return int(_BACKGROUND_SECONDS * 1000)
        if unwanted:
            return int(_UNWANTED_SECONDS * 1000)
        return int(_MIRROR_SECONDS * 1000) if self._asked else None

    def _read(self) -> bool:
        """Reads what was typed; returns False if the terminal is gone."""
        try:
            data = os.read(self._terminal, 4096)
        except BlockingIOError:
            return True
        except OSError:
            return False
        modes = termios.tcgetattr(self.fd)
        if modes[_FLAGS] & termios.ICANON and not data.endswith(b"\n"):
            data += modes[_CHARACTERS][termios.VEOF]  # somebody has typed Ctrl-D
        self._unsent = data
        return True

    def _mirror_modes(self) -> None:
        with self._lock, contextlib.suppress(OSError, termios.error):
            if self._paused or not self._in_foreground():
                return
            ours, theirs = termios.tcgetattr(self._terminal), termios.tcgetattr(self.fd)
            wanted = ours[_FLAGS] & ~_MIRRORED | theirs[_FLAGS] & _MIRRORED
            if wanted == ours[_FLAGS]:
                return
            if self._restored is None:
                self._restored = termios.tcgetattr(self._terminal)
            ours[_FLAGS] = wanted
            if not wanted & termios.ICANON:
                for index in (termios.VMIN, termios.VTIME):
                    ours[_CHARACTERS][index] = theirs[_CHARACTERS][index]
            termios.tcsetattr(self._terminal, termios.TCSANOW, ours)

    def _is_awaited(self) -> bool:
        """Returns whether the worker, or a process that it has started, waits for its input."""
        pids = [self.pid]
        for pid in pids:
            with contextlib.suppress(OSError):
                for thread in os.listdir(f"/proc/{pid}/task"):
                    if self._is_read_by(f"/proc/{pid}/task/{thread}"):
                        return True
                    with open(f"/proc/{pid}/task/{thread}/children") as file:
                        pids += map(int, file.read().split())
        return False

    def _is_read_by(self, thread: str) -> bool:
        with open(f"{thread}/syscall") as file:
            call = file.read().split()  # its number and its arguments, or one word
        if len(call) < 2 or call[0] != _READ_CALLS.get(platform.machine()):
            return False
        return os.readlink(f"{thread}/fd/{int(call[1], 16)}") == self._name

"""Carries what is typed at the launcher's terminal to one worker, only in the foreground.

Workers have sessions of their own, so the system lets them read the launcher's terminal at any
time. In the background, or while the launcher is suspended, they would get what is meant for the
shell or for another program. So the worker gets a pseudo-terminal, and the launcher reads.

It reads only once the worker wants input. Otherwise what is typed stays with the terminal, for the
shell that comes after the launch. A worker wants input if its program uses ``sys.stdin`` (see
`RelayedInput`), or if one of its processes is found waiting for that pseudo-terminal: in read,
select, poll or epoll.

If the program switches off the echo of its terminal, as getpass does, or reads single characters,
the launcher's terminal is set to the same, and back in time.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import select
import termios
import threading
from collections.abc import Callable, Iterator
from typing import Any

from zrpc.launch.awaited_descriptors import awaited_descriptors

_STDIN = 0
_INPUT_FLAGS = 0  # of what tcgetattr returns
_FLAGS = 3  # the local modes
_CHARACTERS = 6
_MIRRORED = termios.ECHO | termios.ECHONL | termios.ICANON
_MIRROR_SECONDS = 0.1  # faster than somebody types after a prompt
_BACKGROUND_SECONDS = 0.5  # `fg` of a running job sends no signal
_UNWANTED_SECONDS = 0.2  # until a worker that did not want input is looked at again
_DEV_TTY = os.makedev(5, 0)


class Keyboard:
    """The launcher's standard input: what the worker that gets it reads from.

    Attributes:
        fd: The worker's standard input; None for the null device.
        relays: Whether the launcher reads the terminal, and carries what was typed to the worker.
    """

    relays = False

    def __init__(self, fd: int | None) -> None:
        self.fd = fd

    def serve(self, pid: int) -> None:
        """Begins to serve the worker with this process id, which has been given `fd`."""

    def on_exit(self, pid: int) -> None:
        """Ends the relay if the worker that exited had it."""

    def resize(self) -> None:
        """Gives the worker's terminal the size of the launcher's."""

    def pause(self) -> None:
        """Restores the modes of the launcher's terminal, and leaves it alone until `resume`."""

    def resume(self) -> None:
        """Uses the terminal again."""

    def close(self) -> None:
        """Ends the relay. Idempotent."""


def open_keyboard(busy: Callable[[], bool], on_waiting: Callable[[], None]) -> Keyboard:
    """Opens standard input for a worker; it is relayed if it is this session's terminal.

    Args:
        busy: Says whether something else reads the terminal, such as a debugger's prompt.
        on_waiting: Called, once, when the worker wants input and this process is in the background.
    """
    try:
        os.tcgetpgrp(_STDIN)
    except OSError:  # it isn't the terminal of this session
        return Keyboard(None if _is_of_another_session() else _STDIN)
    try:
        return _TerminalInput(busy, on_waiting)
    except OSError:  # without pseudo-terminals the worker reads directly
        return Keyboard(_STDIN)


def _is_of_another_session() -> bool:
    """Returns whether standard input is a terminal that another shell reads: see setsid(1)."""
    if not os.isatty(_STDIN):
        return False
    device = os.fstat(_STDIN).st_rdev
    # /dev/tty is the terminal of the session in which it was opened, and that isn't this one.
    return device in (_DEV_TTY, *_terminals())


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


class _TerminalInput(Keyboard):
    """Serves one worker. A thread of it reads the terminal. See `open_keyboard`."""

    relays = True
    fd: int

    def __init__(self, busy: Callable[[], bool], on_waiting: Callable[[], None]) -> None:
        self._pid = 0
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
        if not self._has_terminal():  # the modes may be those of the shell, as it edits a line
            modes[_INPUT_FLAGS] |= termios.ICRNL
            modes[_FLAGS] |= termios.ICANON | termios.ECHO
        termios.tcsetattr(self.fd, termios.TCSANOW, modes)
        self.resize()

    def serve(self, pid: int) -> None:
        self._pid = pid
        self._thread.start()

    def on_exit(self, pid: int) -> None:
        if pid == self._pid:
            self.close()

    def resize(self) -> None:
        if self._close >= 0:
            size = fcntl.ioctl(self._terminal, termios.TIOCGWINSZ, bytes(8))
            fcntl.ioctl(self.fd, termios.TIOCSWINSZ, size)

    def resume(self) -> None:
        with self._lock:
            self._paused = False

    def pause(self) -> None:
        with self._lock, contextlib.suppress(OSError, termios.error):
            restored, self._restored = self._restored, None
            if restored is not None and self._in_foreground():
                termios.tcsetattr(self._terminal, termios.TCSANOW, restored)
            self._paused = True

    def close(self) -> None:
        if self._close < 0:
            return
        self.pause()
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
        pids = [self._pid]
        for pid in pids:
            with contextlib.suppress(OSError):
                for thread in os.listdir(f"/proc/{pid}/task"):
                    if self._is_read_by(f"/proc/{pid}/task/{thread}"):
                        return True
                    with open(f"/proc/{pid}/task/{thread}/children") as file:
                        pids += map(int, file.read().split())
        return False

    def _is_read_by(self, thread: str) -> bool:
        for fd in awaited_descriptors(thread):
            with contextlib.suppress(OSError):  # it is closed
                if os.readlink(f"{thread}/fd/{fd}") == self._name:
                    return True
        return False

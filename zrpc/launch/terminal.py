"""The terminal at which workers are debugged: one worker at a time, line by line.

The terminal stays in the mode in which it is, with the echo and the line editing of the system, so
nothing has to be restored however a session ends.
"""

from __future__ import annotations

import contextlib
import os
import socket
import termios
import threading
from pathlib import Path

from zrpc.launch.descriptors import readable

_STDIN, _STDERR = 0, 2
_NAME = "debugger"
_MAX_WAITING = 128  # more workers than this wait in vain for a free place in the queue


def is_usable() -> bool:
    """Returns whether this process has a terminal, and is in its foreground."""
    try:
        return os.isatty(_STDIN) and os.isatty(_STDERR) and os.tcgetpgrp(_STDIN) == os.getpgrp()
    except OSError:  # it is another session's terminal
        return False


def is_in_foreground() -> bool:
    """Returns whether this process has a terminal, which it may read and write now."""
    try:
        with open("/dev/tty", "rb", buffering=0) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def relay(connection: socket.socket, wake: int | None = None) -> bool:
    """Carries lines from the terminal to a worker's debugger, and text back to standard error.

    What was typed before is dropped. At Ctrl-D the debugger gets its command ``EOF``, which quits.

    Args:
        connection: to the worker.
        wake: a descriptor; when it is readable, the session ends.

    Returns:
        True if the worker ended the session, False if ``wake`` did.
    """
    with contextlib.suppress(termios.error):
        termios.tcflush(_STDIN, termios.TCIFLUSH)
    while True:
        ready = readable(connection.fileno(), _STDIN, *([] if wake is None else [wake]))
        if wake in ready:
            return False
        try:
            if connection.fileno() in ready:
                data = connection.recv(65536)
                if not data:
                    return True
                _show(data)
            if _STDIN in ready:
                connection.sendall(os.read(_STDIN, 4096) or b"EOF\n")
        except OSError:  # the worker is gone, or the terminal
            return True


def _show(data: bytes) -> None:
    while data:
        data = data[os.write(_STDERR, data) :]


class Terminal:
    """Gives the launcher's terminal to the workers that stand at a breakpoint, while entered.

    A thread of it serves them, in the order in which they have come.

    Args:
        directory: a private directory, for its socket.

    Attributes:
        env: the variable that leads workers to it.
    """

    def __init__(self, directory: str) -> None:
        path = Path(directory) / _NAME
        self.env = {"ZRPC_DEBUGGER": str(path)}
        self._busy = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(_MAX_WAITING)
        self._reading, self._writing = os.pipe()
        self._thread = threading.Thread(target=self._serve, name="zrpc-terminal", daemon=True)

    def is_busy(self) -> bool:
        """Returns whether a worker's debugger gets what is typed. From any thread."""
        return self._busy

    def _serve(self) -> None:
        while True:
            if self._reading in readable(self._listener.fileno(), self._reading):
                return
            connection, _ = self._listener.accept()
            self._busy = True
            with connection:
                if not relay(connection, self._reading):
                    return
            self._busy = False

    def __enter__(self) -> Terminal:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        os.write(self._writing, b"x")
        self._thread.join()
        self._listener.close()
        os.close(self._reading)
        os.close(self._writing)

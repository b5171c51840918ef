"""The connection of a thread at a breakpoint to the terminal at which it is debugged.

It is a Unix socket that carries text both ways. Under ``zrpc launch`` on a terminal the launcher
listens, in a private directory, and serves one worker at a time. Otherwise the worker listens in
its own private directory for ``zrpc debug``. If that is detached, the worker listens again.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from pathlib import Path

from zrpc.runtime.thread_pool import waiting
from zrpc.services.inspection.listener import peer_of

# The variable with the path of the launcher's socket, and the socket's name in a worker's own
# private directory.
LAUNCHER = "ZRPC_DEBUGGER"
SOCKET = "debug"
_NEW = "new"  # not longer than the names of a worker's other sockets


class Prompt:
    """What pdb reads from and writes to. For the thread at the breakpoint; any may `release` it.

    Args:
        who: the worker, for messages: its name, rank and process id.
        where: what happened, and in which line.
        attach: what to pass to ``zrpc debug``.
        directory: the worker's private directory; None if it has none.
        timeout: for how many seconds to wait until somebody attaches; 0 means no limit.
    """

    def __init__(
        self, who: str, where: str, attach: str, directory: Path | None, timeout: float
    ) -> None:
        self._who = who
        self._where = where
        self._attach = attach
        self._directory = directory
        self._timeout = timeout
        self._released = False
        self._socket: socket.socket | None = None
        self._unread = b""
        self._last_line = ""

    def connect(self) -> bool:
        """Waits until the terminal is free, or somebody attaches; returns whether one has."""
        launcher = os.environ.get(LAUNCHER)
        with waiting():
            if launcher:
                self._say("")
                with contextlib.suppress(OSError):  # the launcher is about to stop
                    self._open().connect(launcher)
                    self.write(f"\n-- {self._who} {self._where}\n")
                    return not self._released
            return self._listen()

    def _open(self) -> socket.socket:
        self._socket = opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        if self._released:
            opened.close()
        return opened

    def _listen(self) -> bool:
        if self._directory is None or self._released:
            self._say(
                ", but goes on: there is no terminal, and nothing to attach to outside a mesh"
            )
            return False
        path = self._directory / SOCKET
        listener = self._open()
        try:
            # The socket gets its name after it listens, or somebody would be refused.
            new = self._directory / _NEW
            listener.bind(str(new))
            listener.listen(1)
            new.rename(path)
            listener.settimeout(self._timeout or None)
            self._say(f"; to debug it, run on this host as this user: zrpc debug {self._attach}")
            connection = self._accept(listener)
        except TimeoutError:
            self._say(f" no longer: nobody has attached within {self._timeout:g} s")
            return False
        except OSError:  # released, or the directory is gone
            return False
        finally:
            listener.close()
            with contextlib.suppress(OSError):
                path.unlink()
        self._socket = connection
        self.write(f"-- {self._who} {self._where}\n")
        return not self._released

    def _accept(self, listener: socket.socket) -> socket.socket:
        while True:
            connection, _ = listener.accept()
            _, user = peer_of(connection)
            if user in (os.geteuid(), 0):
                connection.settimeout(None)
                return connection
            connection.close()

    def _say(self, text: str) -> None:
        sys.stderr.write(f"zrpc: {self._who} {self._where}{text}\n")
        sys.stderr.flush()

    def readline(self) -> str:
        """Returns the next line; waits for another terminal if this one is detached."""
        while not self._released and self._socket is not None:
            line, end, rest = self._unread.partition(b"\n")
            if end:
                self._unread = rest
                return line.decode(errors="replace") + "\n"
            try:
                with waiting():
                    data = self._socket.recv(4096)
            except OSError:
                data = b""
            self._unread += data
            if not data:
                self._unread = b""
                self._socket.close()
                prompt = self._last_line
                if self.connect():
                    self.write(prompt)
        return "continue\n"

    def write(self, text: str) -> int:
        """Shows text at the terminal; drops it if nobody is attached."""
        self._last_line = (self._last_line + text).rpartition("\n")[2]
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.sendall(text.encode(errors="replace"))
        return len(text)

    def flush(self) -> None:
        """Does nothing: nothing is buffered."""

    def release(self) -> None:
        """Ends all waits of the thread at the breakpoint, which goes on."""
        self._released = True
        if (opened := self._socket) is not None:
            with contextlib.suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Gives the terminal back."""
        if self._socket is not None:
            self.write(f"-- {self._who} goes on\n")
            self._socket.close()
            self._socket = None

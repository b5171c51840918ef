"""What starts processes: the interface that the fork server and its substitute share."""

from __future__ import annotations

import abc
import os
import selectors
import socket
import struct
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from .errors import LaunchError, ServerDied
from .task import Task

if TYPE_CHECKING:
    from typing_extensions import Self

DEFAULT_PRELOAD = ("torch", "zmq", "cloudpickle", "zrpc.api", "zrpc.agent")
EXIT = struct.Struct("=qq")  # process id, exit code


def short_directory() -> str:
    """Make a private directory whose path leaves room for ZeroMQ's limit of 107 bytes."""
    root = tempfile.gettempdir()
    fits = len(os.fsencode(root)) <= 40 or not os.path.isdir("/tmp")
    return tempfile.mkdtemp(prefix="zrpc-", dir=root if fits else "/tmp")


@dataclass(frozen=True)
class Exit:
    """The end of one process.

    Attributes:
        pid: Its process id.
        returncode: Its exit code, or minus the number of the signal that killed it, as in
            `subprocess`.
    """

    pid: int
    returncode: int


class Starter(abc.ABC):
    """Starts processes, reports their exits, and lets none of them outlive itself.

    A context manager: entering starts it, leaving kills every process that still runs.

    To wait for exits beside other things, put the starter into a selector (it has a `fileno`)
    and call `exits` when it is readable. One thread at a time may wait for exits; requests are
    serialized by a lock.
    """

    def __init__(self) -> None:
        self._exit_socket: socket.socket | None = None
        self._partial = bytearray()
        self._kept: deque[Exit] = deque()  # exits that `wait` met while it waited for another

    @abc.abstractmethod
    def start(self) -> None:
        """Get ready to start processes; return at once if that has been done.

        Raises:
            LaunchError: It could not be done, or not in time.
        """

    @abc.abstractmethod
    def spawn(
        self,
        task: Task,
        *,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        pass_fds: Sequence[int] = (),
    ) -> int:
        """Start a process.

        Args:
            task: What it runs, and where.
            stdin: A descriptor for its standard input; None for the null device.
            stdout: A descriptor for its standard output; None for this process's own.
            stderr: A descriptor for its standard error; None for this process's own.
            pass_fds: Descriptors that are open in the process under the same numbers. All
                others are closed there. The caller's copies stay open here.

        Returns:
            The process id. The process leads a session, and so a process group, of its own.

        Raises:
            LaunchError: The process could not be started.
            ServerDied: The server that should start it is gone.
        """

    @abc.abstractmethod
    def send_signal(self, pid: int, number: int, *, group: bool = False) -> bool:
        """Send a signal to a process started here, never to a later one of the same number.

        Args:
            pid: The process.
            number: The signal.
            group: Whether its children in its process group get the signal too.

        Returns:
            False if the process has ended already.
        """

    @abc.abstractmethod
    def make_directory(self) -> str:
        """Make a private directory with a short path that vanishes with this starter.

        The fork server also removes it when this process is killed.
        """

    @abc.abstractmethod
    def close(self, timeout: float = 10.0) -> None:
        """Kill every process that still runs and release everything. Idempotent.

        Args:
            timeout: Seconds after which the server itself is killed.
        """

    def fileno(self) -> int:
        """A descriptor that is readable when there are exits to report."""
        return self._exit_end().fileno()

    def exits(self, timeout: float = 0.0) -> list[Exit]:
        """The exits since the last call, in the order in which they were noticed.

        Args:
            timeout: Seconds to wait for the first one.

        Raises:
            ServerDied: The server is gone; so are the processes.
        """
        found = list(self._kept)
        self._kept.clear()
        return found or self._read_exits(timeout)

    def wait(self, pid: int, timeout: float) -> int:
        """Wait for one process.

        Args:
            pid: A process started here whose exit hasn't been reported.
            timeout: Seconds to wait.

        Returns:
            Its exit code, as in `Exit`. Other exits stay for `exits` and `wait`, but don't make
            `fileno` readable any more: call `exits` once before selecting.

        Raises:
            TimeoutError: It still runs.
            ServerDied: The server is gone; so is the process.
        """
        deadline = time.monotonic() + timeout
        while True:
            for found in self._kept:
                if found.pid == pid:
                    self._kept.remove(found)
                    return found.returncode
            left = deadline - time.monotonic()
            news = self._read_exits(max(0.0, left))
            self._kept.extend(news)
            if not news and left <= 0:
                raise TimeoutError(f"process {pid} still runs after {timeout:g} s")

    def _exit_end(self) -> socket.socket:
        if self._exit_socket is None:
            raise LaunchError(f"{type(self).__name__} isn't running; use it in a with statement")
        return self._exit_socket

    def _read_exits(self, timeout: float) -> list[Exit]:
        sock = self._exit_end()
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(sock, selectors.EVENT_READ)
            while selector.select(max(0.0, deadline - time.monotonic())):
                try:
                    data = sock.recv(65536)
                except ConnectionError:
                    data = b""
                if not data:
                    raise ServerDied(f"the {type(self).__name__} ended; was it killed?")
                self._partial += data
                whole = len(self._partial) // EXIT.size * EXIT.size
                if whole:
                    found = [Exit(*each) for each in EXIT.iter_unpack(self._partial[:whole])]
                    del self._partial[:whole]
                    return found
        return []

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

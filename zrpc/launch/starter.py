"""Starts processes: the interface that the fork server and its substitute share."""

from __future__ import annotations

import abc
import os
import selectors
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zrpc.launch.interpreter import interpreter_options
from zrpc.launch.signal_state import SignalState
from zrpc.launch.task import Task

if TYPE_CHECKING:
    from typing import Self

DEFAULT_PRELOAD = ("torch", "zmq", "cloudpickle", "zrpc.api", "zrpc.agent.agent")
Streams = tuple[int | None, int | None, int | None]  # standard input, output and error
METHODS = ("fork", "spawn")
_METHOD_VARIABLE = "ZRPC_START_METHOD"
EXIT_RECORD = struct.Struct("=qq")  # process id, exit code


class LaunchError(RuntimeError):
    """Workers could not be started, watched or stopped.

    Not raised when a worker fails: its exit code is the result of the launch.
    """


class ServerDied(LaunchError):
    """The fork server exited while it was still needed, and its children with it."""


# The first code of a new process, before any import. It makes this package importable. Neither the
# working directory nor this package's own imports affect the program that runs later there.
_BOOTSTRAP = """\
import sys
startup_modules = frozenset(sys.modules)
if sys.path and not sys.path[0]:
    del sys.path[0]
from importlib.util import find_spec
if find_spec("zrpc") is None:
    sys.path.append({root!r})
{main}
"""


def python_command(main: str) -> list[str]:
    """Returns the command that runs the code ``main`` in an interpreter with the same options.

    Raises:
        LaunchError: This process doesn't know its interpreter, as when Python is embedded.
    """
    if not sys.executable:
        raise LaunchError("sys.executable is empty: there is no interpreter to start")
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return [sys.executable, *interpreter_options(), "-c", _BOOTSTRAP.format(root=root, main=main)]


@dataclass(frozen=True)
class Exit:
    """The exit of one process."""

    pid: int
    returncode: int  # or minus the number of the signal that killed it, as in `subprocess`


class Starter(abc.ABC):
    """Starts processes, reports their exits, and lets none of them outlive itself.

    It is a context manager: entering starts it, leaving kills every process still running.

    To wait for exits and other events at once, put the starter into a selector (it has a `fileno`)
    and call `exits` when it is readable. Only one thread at a time may wait for exits; requests
    are serialized by a lock.

    Attributes:
        threads: The threads, by name, that keep it from forking. It starts interpreters instead.
    """

    def __init__(self) -> None:
        self.threads: list[str] = []
        self._exit_socket: socket.socket | None = None
        self._unparsed = bytearray()
        self._unclaimed: deque[Exit] = deque()  # read by `wait` while it waited for another

    @property
    def note(self) -> str:
        """Why it starts interpreters although it was asked to fork, for the user; or empty."""
        if not self.threads:
            return ""
        return (
            f"workers can't be forked, because something starts threads in each interpreter "
            f"({', '.join(self.threads)}). So each worker is a new interpreter, which takes longer "
            "to start"
        )

    @abc.abstractmethod
    def start(self) -> None:
        """Gets ready to start processes. Returns at once if that has been done.

        Raises:
            LaunchError: The starter could not get ready, or not in time.
        """

    def spawn(
        self,
        task: Task,
        *,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        pass_fds: Sequence[int] = (),
    ) -> int:
        """Starts a process.

        Args:
            task: The program that it runs, and its environment.
            stdin: A descriptor for its standard input; None for the null device.
            stdout: A descriptor for its standard output; None for this process's own.
            stderr: A descriptor for its standard error; None for this process's own.
            pass_fds: Descriptors to keep open in the process, under the same numbers. All others
                are closed there. The caller's own copies stay open.

        Returns:
            The process id. The process leads its own session, and so its own process group.

        Raises:
            LaunchError: The process could not be started.
            ServerDied: The server that should start it is gone.
        """
        return self._spawn(task, (stdin, stdout, stderr), pass_fds)

    @abc.abstractmethod
    def _spawn(self, task: Task, streams: Streams, pass_fds: Sequence[int]) -> int:
        """Starts a process; see `spawn`."""

    @abc.abstractmethod
    def send_signal(self, pid: int, number: int, *, group: bool = False) -> bool:
        """Sends a signal to a process started here, never to a later one with the same pid.

        With `group`, its children in the same process group get the signal too. Returns False if
        the process has already exited.
        """

    @abc.abstractmethod
    def make_directory(self) -> str:
        """Makes a private directory with a short path that is removed with this starter.

        The fork server also removes it if this process is killed.
        """

    @abc.abstractmethod
    def close(self, timeout: float = 10.0) -> None:
        """Kills every process still running and releases everything. Idempotent.

        After `timeout` seconds, the server itself is killed.
        """

    def fileno(self) -> int:
        """Returns a descriptor that is readable when there are exits to report."""
        return self._require_exit_socket().fileno()

    def exits(self, timeout: float = 0.0) -> list[Exit]:
        """Returns the exits since the last call, in the order in which they were noticed.

        Waits up to ``timeout`` seconds for the first one.

        Raises:
            ServerDied: The server is gone; so are the processes.
        """
        unclaimed = list(self._unclaimed)
        self._unclaimed.clear()
        return unclaimed or self._read_exits(timeout)

    def wait(self, pid: int, timeout: float) -> int:
        """Waits for one process, started here, whose exit hasn't been reported.

        Returns its exit code, as in `Exit`. Other exits are kept for `exits` and `wait`, but no
        longer make `fileno` readable: call `exits` once before selecting.

        Raises:
            TimeoutError: The process is still running.
            ServerDied: The server is gone; so is the process.
        """
        deadline = time.monotonic() + timeout
        while True:
            for found in self._unclaimed:
                if found.pid == pid:
                    self._unclaimed.remove(found)
                    return found.returncode
            left = deadline - time.monotonic()
            exits = self._read_exits(max(0.0, left))
            self._unclaimed.extend(exits)
            if not exits and left <= 0:
                raise TimeoutError(f"process {pid} is still running after {timeout:g} s")

    def _require_exit_socket(self) -> socket.socket:
        if self._exit_socket is None:
            raise LaunchError(f"{type(self).__name__} isn't running; use it in a with statement")
        return self._exit_socket

    def _read_exits(self, timeout: float) -> list[Exit]:
        sock = self._require_exit_socket()
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            selector.register(sock, selectors.EVENT_READ)
            while selector.select(max(0.0, deadline - time.monotonic())):
                try:
                    data = sock.recv(65536)
                except ConnectionError:
                    data = b""
                if not data:
                    raise ServerDied(f"the {type(self).__name__} has exited; was it killed?")
                self._unparsed += data
                size = len(self._unparsed) // EXIT_RECORD.size * EXIT_RECORD.size
                if size:
                    records = EXIT_RECORD.iter_unpack(self._unparsed[:size])
                    exits = [Exit(pid, returncode) for pid, returncode in records]
                    del self._unparsed[:size]
                    return exits
        return []

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def start_method(wanted: str | None = None) -> str:
    """Returns the start method to use.

    Args:
        wanted: ``fork`` or ``spawn``; None for the value of the environment variable
            ``ZRPC_START_METHOD``. Without either it is fork on Linux and spawn elsewhere
            (Windows has no fork, and macOS's system libraries don't survive it).

    Raises:
        ValueError: There is no such method, or not on this system.
    """
    method = (
        wanted
        or os.environ.get(_METHOD_VARIABLE)
        or ("fork" if sys.platform == "linux" else "spawn")
    )
    if method not in METHODS:
        raise ValueError(f"expected one of {METHODS} as the start method, but got {method!r}")
    if method == "fork" and sys.platform != "linux":
        raise ValueError(f"the start method 'fork' needs Linux, but this is {sys.platform}")
    return method


def make_starter(
    wanted: str | None = None,
    *,
    preload: Sequence[str] = DEFAULT_PRELOAD,
    env: Mapping[str, str] | None = None,
    given: SignalState | None = None,
    spare_detached: bool = False,
) -> Starter:
    """Makes a starter that uses the method `wanted` (see `start_method`). Enter it to start it.

    For the other arguments see `ForkServer`.
    """
    if start_method(wanted) == "fork":
        from zrpc.launch.forkserver import ForkServer  # only importable on Linux

        return ForkServer(preload=preload, env=env, given=given, spare_detached=spare_detached)
    from zrpc.launch.spawner import SpawnServer

    return SpawnServer(env=env, given=given)

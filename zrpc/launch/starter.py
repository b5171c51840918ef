"""Starts processes by a server, which forks them or starts interpreters."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from zrpc.launch.channel import EXIT_RECORD, EXITS_BYTES, MAX_DESCRIPTORS, Channel
from zrpc.launch.descriptors import output_of_child, readable
from zrpc.launch.errors import LaunchError, ServerDied
from zrpc.launch.interpreter import python_command
from zrpc.launch.signals import SignalState, blocked
from zrpc.launch.task import Task

DEFAULT_PRELOAD = ("torch", "zmq", "cloudpickle", "zrpc.api", "zrpc.agent.agent")
METHODS = ("fork", "spawn")
_METHOD_VARIABLE = "ZRPC_START_METHOD"
_REPLY_SECONDS = 120.0  # the first reply takes long, since the server imports modules
_EXITED = "the fork server has exited; was it killed? Its own output may show why"

_SERVE = """\
from zrpc.launch.server import serve
serve({}, {}, {owner}, startup_modules)()
"""


@dataclass(frozen=True)
class Exit:
    """The exit of one process."""

    pid: int
    returncode: int  # or minus the number of the signal that killed it, as in `subprocess`


class _Server(NamedTuple):
    """A running server, as its owner sees it."""

    process: subprocess.Popen[bytes]
    channel: Channel
    exits: socket.socket


class Starter:
    """Starts processes, reports their exits, and lets none of them outlive itself.

    A server does that: a fresh interpreter with a single thread, so that forking it is safe
    whatever threads its owner runs. It imports the heavy modules once, and forks each process in
    milliseconds. It exits when its owner closes it or dies, and kills all its descendants first.

    If the method is ``spawn``, or if the server can't be forked, each process is a new interpreter,
    and nothing is imported before. It can't if a tool starts a thread in each interpreter, or if
    something uses the accelerator while modules are imported.

    It is a context manager: entering starts the server, leaving kills every process still running.
    To wait for exits and other events at once, put the starter into a selector (it has a `fileno`)
    and call `exits` when it is readable. Only one thread at a time may wait for exits; requests
    are serialized by a lock.

    Args:
        method: ``fork`` or ``spawn``.
        preload: Modules to import before forking. One that can't be imported is skipped: the
            process that needs it gets the error.
        env: Environment of the server and the default for its processes; None for a copy of this
            process's. Variables that libraries read when they are loaded, such as
            ``OMP_NUM_THREADS``, must be set here.
        given: The signals that the processes ignore and block; None for those that the thread
            which starts the server does.
        spare_detached: Whether processes that have left the sessions of those it has started
            outlive it.

    Attributes:
        pid: The server's process id, once it has started.
        obstacle: What keeps it from forking, so that it starts interpreters instead; or empty.

    Example:
        >>> with Starter(preload=["json"]) as starter:
        ...     pid = starter.spawn(Task.function("json:dumps", 1))
        ...     _ = starter.wait(pid, timeout=10)
    """

    def __init__(
        self,
        method: str = "fork",
        *,
        preload: Sequence[str] = DEFAULT_PRELOAD,
        env: Mapping[str, str] | None = None,
        given: SignalState | None = None,
        spare_detached: bool = False,
    ) -> None:
        self.pid = 0
        self.obstacle = ""
        self._forks = method == "fork"
        self._preload = list(preload)
        self._env = None if env is None else dict(env)
        self._given = given
        self._spare_detached = spare_detached
        self._unclaimed: deque[Exit] = deque()  # read by `wait` while it waited for another
        self._lock = threading.RLock()  # guards everything below
        self._server: _Server | None = None
        self._running: set[int] = set()
        self._directories: list[str] = []

    @property
    def note(self) -> str:
        """Why it starts interpreters although it was asked to fork, for the user; or empty."""
        if not self.obstacle:
            return ""
        return (
            f"workers can't be forked, because {self.obstacle}. So each worker is a new "
            "interpreter, which takes longer to start"
        )

    def start(self) -> None:
        """Starts the server and waits until its imports are done, unless it has been started.

        Raises:
            LaunchError: The server could not be started, or not in time.
        """
        with self._lock:
            if self._server is not None:
                return
            self._server = self._launch()
            self.pid = self._server.process.pid
            given = SignalState.current() if self._given is None else self._given
            settings = self._forks, self._preload, given, self._spare_detached
            try:
                self.obstacle = self._ask(settings)
            except BaseException:
                self.close(timeout=0)
                raise

    def _launch(self) -> _Server:
        # Requests and replies go over one socket, exits over another, so that the owner can wait
        # for exits in a selector and none is hidden in a buffer.
        requests, servers_requests = socket.socketpair()
        exits, servers_exits = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with servers_requests, servers_exits:
            # Numbers above those of the standard streams, which may be closed in this process.
            ends = (servers_requests, servers_exits)
            fds = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 3) for end in ends]
        try:
            process = self._start_process(fds)
        except OSError as error:
            requests.close()
            exits.close()
            raise LaunchError(f"could not start the fork server: {error}") from error
        finally:
            for fd in fds:
                os.close(fd)
        requests.settimeout(_REPLY_SECONDS)
        return _Server(process, Channel(requests), exits)

    def _start_process(self, fds: Sequence[int]) -> subprocess.Popen[bytes]:
        """Starts the server's process, which serves requests and reports exits at these sockets."""
        with blocked():
            return subprocess.Popen(
                python_command(_SERVE.format(*fds, owner=os.getpid())),
                stdin=subprocess.DEVNULL,
                stdout=output_of_child(1),
                stderr=output_of_child(2),
                env=self._env,
                pass_fds=fds,
                start_new_session=True,  # the owner handles a Ctrl-C at the terminal
            )

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
        if len(pass_fds) > MAX_DESCRIPTORS - 3 or any(fd < 3 for fd in pass_fds):
            raise ValueError(
                f"expected at most {MAX_DESCRIPTORS - 3} descriptors above 2 as pass_fds, but got "
                f"{pass_fds}"
            )
        if task.cwd is not None and not os.path.isdir(task.cwd):
            raise LaunchError(f"expected a directory to work in, but got {task.cwd!r}")
        targets = {i: fd for i, fd in enumerate((stdin, stdout, stderr)) if fd is not None}
        targets.update((fd, fd) for fd in pass_fds)
        with self._lock:
            pid: int = self._ask(("spawn", task, list(targets)), list(targets.values()))
            self._running.add(pid)
        return pid

    def send_signal(self, pid: int, number: int, *, group: bool = False) -> bool:
        """Sends a signal to a process started here, never to a later one with the same pid.

        With `group`, its children in the same process group get the signal too. Returns False if
        the process has already exited.
        """
        return bool(self._ask(("signal", pid, int(number), group)))

    def make_directory(self) -> str:
        """Makes a private directory with a short path that is removed with this starter.

        The server also removes it if this process is killed.
        """
        path: str = self._ask(("directory",))
        self._directories.append(path)
        return path

    @property
    def broken(self) -> bool:
        """Whether it takes no more requests, since one of them was broken off."""
        return self._server is not None and self._server.channel.fileno() < 0

    def _ask(self, request: tuple[Any, ...], fds: Sequence[int] = ()) -> Any:
        with self._lock:
            channel = self._running_server().channel
            if channel.fileno() < 0:
                raise ServerDied("the fork server was stopped, as a request to it was broken off")
            try:
                channel.send(request, fds)
                (kind, value), _ = channel.receive()
            except (ConnectionError, EOFError) as error:
                raise ServerDied(_EXITED) from error
            except TimeoutError as error:
                channel.close()  # or the reply would be taken for that to the next request
                text = f"the fork server did not answer within {_REPLY_SECONDS:g} s"
                raise LaunchError(text) from error
            except OSError:
                raise  # a descriptor is wrong: nothing was sent
            except BaseException:
                channel.close()
                raise
        if kind == "failed":
            raise LaunchError(f"the fork server could not carry out a request: {value}")
        return value

    def fileno(self) -> int:
        """Returns a descriptor that is readable when there are exits to report."""
        return self._running_server().exits.fileno()

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

    def _running_server(self) -> _Server:
        if self._server is None:
            raise LaunchError("the fork server isn't running; use it in a with statement")
        return self._server

    def _read_exits(self, timeout: float) -> list[Exit]:
        sock = self._running_server().exits
        if not readable(sock.fileno(), timeout=timeout):
            return []
        data = sock.recv(EXITS_BYTES)
        if not data:
            raise ServerDied(_EXITED)
        exits = [Exit(pid, code) for pid, code in EXIT_RECORD.iter_unpack(data)]
        with self._lock:
            self._running.difference_update(found.pid for found in exits)
        return exits

    def close(self, timeout: float = 10.0) -> None:
        """Kills every process still running and releases everything. Idempotent.

        After `timeout` seconds, the server itself is killed.
        """
        with self._lock:
            server, self._server = self._server, None
            if server is None:
                return
            server.channel.close()
            server.exits.close()
            try:
                server.process.wait(timeout)
            except subprocess.TimeoutExpired:
                server.process.kill()
                server.process.wait()
            if server.process.returncode != 0:
                self._clean_up_after_server()
            self._running.clear()

    def _clean_up_after_server(self) -> None:
        # The children died with the server; the processes that they had started did not.
        for pid in self._running:
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
        for directory in self._directories:
            shutil.rmtree(directory, ignore_errors=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def start_method(wanted: str | None = None) -> str:
    """Returns the start method to use.

    Args:
        wanted: ``fork`` or ``spawn``; None for the value of the environment variable
            ``ZRPC_START_METHOD``, and without it ``fork``.

    Raises:
        ValueError: There is no such method.
    """
    method = wanted or os.environ.get(_METHOD_VARIABLE) or "fork"
    if method not in METHODS:
        raise ValueError(f"expected one of {METHODS} as the start method, but got {method!r}")
    return method

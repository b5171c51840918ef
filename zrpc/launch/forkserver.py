"""A warm fork server: pays for imports once, then starts processes in milliseconds."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from zrpc.launch.channel import MAX_DESCRIPTORS, Channel
from zrpc.launch.descriptors import output_of_child
from zrpc.launch.signal_state import SignalState, blocked
from zrpc.launch.starter import (
    DEFAULT_PRELOAD,
    Exit,
    LaunchError,
    ServerDied,
    Starter,
    Streams,
    python_command,
)
from zrpc.launch.task import Task

_START_SECONDS = 120.0  # for the server to start and import
_REPLY_SECONDS = 60.0

_SERVE = """\
from zrpc.launch.server import serve
from zrpc.launch.signal_state import SignalState
serve({}, {}, {owner}, {preload!r}, startup_modules, {given}, {spare_detached})()
"""


class ForkServer(Starter):
    """A clean process that has imported the heavy modules and forks a child per request.

    The server is a fresh interpreter with a single thread, so that forking it is safe whatever
    threads its owner runs. It exits when its owner closes it or dies, and kills all its
    descendants first.

    Args:
        preload: Modules to import before forking. One that can't be imported is skipped: the
            child that needs it gets the error.
        env: Environment of the server and the default for its children; None for a copy of this
            process's. Variables that libraries read when they are loaded, such as
            ``OMP_NUM_THREADS``, must be set here.
        given: The signals that its children ignore and block; None for those that the thread
            which starts the server does.
        spare_detached: Whether processes that have left the sessions of the children outlive it.

    If a tool starts a thread in each interpreter, the server can't be forked. Then each child is a
    new interpreter, and nothing is imported before.

    Attributes:
        pid: The server's process id, once it has started.

    Example:
        >>> with ForkServer(preload=["json"]) as server:
        ...     pid = server.spawn(Task.function("json:dumps", 1))
        ...     _ = server.wait(pid, timeout=10)
    """

    def __init__(
        self,
        *,
        preload: Sequence[str] = DEFAULT_PRELOAD,
        env: Mapping[str, str] | None = None,
        given: SignalState | None = None,
        spare_detached: bool = False,
    ) -> None:
        super().__init__()
        self._given = given
        self._spare_detached = spare_detached
        self.pid = 0
        self._preload = list(preload)
        self._env = None if env is None else dict(env)
        self._lock = threading.RLock()  # guards everything below
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._control: socket.socket | None = None
        self._running: set[int] = set()
        self._directories: list[str] = []

    def start(self) -> None:
        """Starts the server and waits until its imports are done. See `Starter.start`."""
        with self._lock:
            if self._process is not None:
                return
            self._launch()
            try:
                self.threads = self._reply(_START_SECONDS)
            except BaseException:
                self.close(timeout=0)
                raise

    def _launch(self) -> None:
        requests, exits = socket.socketpair(), socket.socketpair()
        # Numbers above those of the standard streams, which may be closed in this process.
        server_fds = [fcntl.fcntl(pair[1], fcntl.F_DUPFD_CLOEXEC, 3) for pair in (requests, exits)]
        try:
            self._process = self._start_process(server_fds)
        except OSError as error:
            for sock in (requests[0], exits[0]):
                sock.close()
            raise LaunchError(f"could not start the fork server: {error}") from error
        finally:
            for fd in server_fds:
                os.close(fd)
            for sock in (requests[1], exits[1]):
                sock.close()
        self.pid = self._process.pid
        self._control, self._exit_socket = requests[0], exits[0]
        self._channel = Channel(self._control)

    def _start_process(self, fds: Sequence[int]) -> subprocess.Popen[bytes]:
        """Starts the server's process, which serves requests and reports exits at these sockets."""
        code = _SERVE.format(
            *fds,
            owner=os.getpid(),
            preload=self._preload,
            given=SignalState.current() if self._given is None else self._given,
            spare_detached=self._spare_detached,
        )
        with blocked():
            return subprocess.Popen(
                python_command(code),
                stdin=subprocess.DEVNULL,
                stdout=output_of_child(1),
                stderr=output_of_child(2),
                env=self._env,
                pass_fds=fds,
                start_new_session=True,  # the owner handles a Ctrl-C at the terminal
            )

    def _spawn(self, task: Task, streams: Streams, pass_fds: Sequence[int]) -> int:
        if len(pass_fds) > MAX_DESCRIPTORS - 3 or any(fd < 3 for fd in pass_fds):
            raise ValueError(
                f"expected at most {MAX_DESCRIPTORS - 3} descriptors above 2 as pass_fds, but got "
                f"{pass_fds}"
            )
        if task.cwd is not None and not os.path.isdir(task.cwd):
            raise LaunchError(f"expected a directory to work in, but got {task.cwd!r}")
        given = {i: fd for i, fd in enumerate(streams) if fd is not None}
        fds = [*given.values(), *pass_fds]
        with self._lock:
            pid: int = self._ask(("spawn", task, list(given), list(pass_fds)), fds)
            self._running.add(pid)
        return pid

    def send_signal(self, pid: int, number: int, *, group: bool = False) -> bool:
        """Sends a signal to a running child. See `Starter.send_signal`."""
        return bool(self._ask(("signal", pid, int(number), group)))

    def make_directory(self) -> str:
        """Makes a private directory that the server removes when it exits. See `Starter`."""
        path: str = self._ask(("directory",))
        self._directories.append(path)
        return path

    @property
    def broken(self) -> bool:
        """Whether it takes no more requests, since one of them was broken off."""
        channel = self._channel
        return channel is not None and channel.fileno() < 0

    def _ask(self, request: tuple[Any, ...], fds: Sequence[int] = ()) -> Any:
        with self._lock:
            if self._channel is None:
                raise LaunchError("the fork server isn't running; use it in a with statement")
            if self._channel.fileno() < 0:
                raise ServerDied("the fork server was stopped, as a request to it was broken off")
            try:
                self._channel.send(request, fds)
                return self._reply(_REPLY_SECONDS)
            except ConnectionError as error:
                raise ServerDied("the fork server has exited; was it killed?") from error
            except (TimeoutError, KeyboardInterrupt):  # between the two as well
                self._channel.close()
                raise

    def _reply(self, timeout: float) -> Any:
        assert self._channel is not None
        assert self._control is not None
        self._control.settimeout(timeout)
        try:
            (kind, value), _ = self._channel.receive()
        except EOFError as error:
            raise ServerDied("the fork server has exited; its own output may show why") from error
        except BaseException as error:
            # The reply would be taken for that to the next request. This ends the server, too.
            self._channel.close()
            if isinstance(error, TimeoutError):
                text = f"the fork server did not answer within {timeout:g} s"
                raise LaunchError(text) from error
            raise
        if kind == "failed":
            raise LaunchError(f"the fork server could not carry out a request: {value}")
        return value

    def _read_exits(self, timeout: float) -> list[Exit]:
        exits = super()._read_exits(timeout)
        with self._lock:
            self._running.difference_update(found.pid for found in exits)
        return exits

    def close(self, timeout: float = 10.0) -> None:
        """Kills all children and stops the server. See `Starter.close`."""
        with self._lock:
            process, self._process = self._process, None
            if process is None:
                return
            assert self._channel is not None
            assert self._exit_socket is not None
            self._channel.close()
            self._exit_socket.close()
            self._channel = self._control = self._exit_socket = None
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.returncode != 0:
                self._clean_up_after_server()
            self._running.clear()

    def _clean_up_after_server(self) -> None:
        # The children died with the server; the processes that they had started did not.
        for pid in self._running:
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
        for directory in self._directories:
            shutil.rmtree(directory, ignore_errors=True)

"""A warm fork server: pay for imports once, then start processes in milliseconds."""

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

from .channel import MAX_DESCRIPTORS, Channel
from .descriptors import output_of_child
from .errors import LaunchError, ServerDied
from .interpreter import BOOTSTRAP, find_zrpc, interpreter
from .starter import DEFAULT_PRELOAD, Exit, Starter
from .task import Task

_REPLY_TIMEOUT = 60.0

_SERVE = """\
from zrpc.launch.server import serve
serve({requests}, {exits}, {owner}, {preload!r}, at_startup)()
"""


class ForkServer(Starter):
    """A clean process that has imported the heavy modules and forks a child per request.

    The server is a fresh interpreter with a single thread, so that forking it is safe whatever
    threads its owner runs. It ends when its owner closes it or dies, and takes all its children
    and their children with it.

    Args:
        preload: Modules to import ahead. One that can't be imported is skipped: the child that
            needs it gets the error.
        env: Environment of the server and the default for its children; None for a copy of this
            process's. What modules and libraries read when they are loaded, such as
            ``OMP_NUM_THREADS``, has to be right here.
        sys_path: ``sys.path`` for the imports and by default for the children; None for what a
            fresh interpreter has.
        start_timeout: Seconds for the server to start and import.

    Attributes:
        preloaded: The modules that were imported, once the server has started.
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
        sys_path: Sequence[str] | None = None,
        start_timeout: float = 120.0,
    ) -> None:
        super().__init__()
        self.preloaded: list[str] = []
        self.pid = 0
        self._preload = list(preload)
        self._env = None if env is None else dict(env)
        self._sys_path = None if sys_path is None else list(sys_path)
        self._start_timeout = start_timeout
        self._lock = threading.RLock()  # guards everything below
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._control: socket.socket | None = None
        self._running: set[int] = set()
        self._directories: list[str] = []

    def start(self) -> None:
        """Start the server and wait until its imports are done. See `Starter.start`."""
        with self._lock:
            if self._process is not None:
                return
            self._launch()
            try:
                self.preloaded = self._reply(self._start_timeout)
            except BaseException:
                self.close(timeout=0)
                raise

    def _launch(self) -> None:
        requests, exits = socket.socketpair(), socket.socketpair()
        # Numbers above those of the standard streams, which may be closed in this process.
        theirs = [fcntl.fcntl(pair[1], fcntl.F_DUPFD_CLOEXEC, 3) for pair in (requests, exits)]
        try:
            self._process = subprocess.Popen(
                [*interpreter(), "-c", self._code(*theirs)],
                stdin=subprocess.DEVNULL,
                stdout=output_of_child(1),
                stderr=output_of_child(2),
                env=self._env,
                pass_fds=theirs,
                start_new_session=True,  # a Ctrl-C at the terminal is the owner's business
            )
        except OSError as error:
            for sock in (requests[0], exits[0]):
                sock.close()
            raise LaunchError(f"could not start the fork server: {error}") from error
        finally:
            for fd in theirs:
                os.close(fd)
            for sock in (requests[1], exits[1]):
                sock.close()
        self.pid = self._process.pid
        self._control, self._exit_socket = requests[0], exits[0]
        self._channel = Channel(self._control)

    def _code(self, requests: int, exits: int) -> str:
        return BOOTSTRAP.format(
            path=find_zrpc(self._sys_path),
            main=_SERVE.format(
                requests=requests, exits=exits, owner=os.getpid(), preload=self._preload
            ),
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
        """Fork a process. See `Starter.spawn`."""
        if len(pass_fds) > MAX_DESCRIPTORS - 3 or any(fd < 3 for fd in pass_fds):
            raise ValueError(
                f"pass_fds takes up to {MAX_DESCRIPTORS - 3} descriptors above 2, got {pass_fds}"
            )
        if task.cwd is not None and not os.path.isdir(task.cwd):
            raise LaunchError(f"the working directory {task.cwd!r} isn't a directory")
        streams = {i: fd for i, fd in enumerate((stdin, stdout, stderr)) if fd is not None}
        fds = [*streams.values(), *pass_fds]
        with self._lock:
            pid: int = self._ask(("spawn", task, list(streams), list(pass_fds)), fds)
            self._running.add(pid)
        return pid

    def send_signal(self, pid: int, number: int, *, group: bool = False) -> bool:
        """Send a signal to a child that runs. See `Starter.send_signal`."""
        return bool(self._ask(("signal", pid, int(number), group)))

    def make_directory(self) -> str:
        """Make a private directory that the server removes at its end. See `Starter`."""
        path: str = self._ask(("directory",))
        self._directories.append(path)
        return path

    def _ask(self, request: tuple[Any, ...], fds: Sequence[int] = ()) -> Any:
        with self._lock:
            if self._channel is None:
                raise LaunchError("the fork server isn't running; use it in a with statement")
            try:
                self._channel.send(request, fds)
            except ConnectionError as error:
                raise ServerDied("the fork server ended; was it killed?") from error
            return self._reply(_REPLY_TIMEOUT)

    def _reply(self, timeout: float) -> Any:
        assert self._channel is not None
        assert self._control is not None
        self._control.settimeout(timeout)
        try:
            (kind, value), _ = self._channel.receive()
        except TimeoutError as error:
            raise LaunchError(f"the fork server did not answer within {timeout:g} s") from error
        except EOFError as error:
            raise ServerDied("the fork server ended; its own output may tell why") from error
        if kind == "failed":
            raise LaunchError(f"the fork server could not do it: {value}")
        return value

    def _read_exits(self, timeout: float) -> list[Exit]:
        found = super()._read_exits(timeout)
        with self._lock:
            self._running.difference_update(each.pid for each in found)
        return found

    def close(self, timeout: float = 10.0) -> None:
        """Kill all children and end the server. See `Starter.close`."""
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
        # The children died with the server; what they had started did not.
        for pid in self._running:
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
        for directory in self._directories:
            shutil.rmtree(directory, ignore_errors=True)

"""Starting each process as a new interpreter, where a fork server can't be."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from . import child, prctl
from .descriptors import output_of_child
from .errors import LaunchError
from .interpreter import BOOTSTRAP, find_zrpc, interpreter
from .starter import EXIT, Starter, short_directory
from .task import Task

_BECOME = """\
from zrpc.launch.spawner import become_task
become_task({path!r}, {parent}, at_startup)()
"""


class SpawnServer(Starter):
    """The fork server's substitute: the same interface, a whole interpreter per process.

    Each process imports everything itself, and no server process watches: if this process is
    killed, Linux kills the processes with it (their children not), other systems don't. On
    Linux a process also ends with the *thread* that called `spawn`.

    Args:
        env: Default environment of the processes; None for a copy of this process's.
        sys_path: Default ``sys.path`` of the processes; None for what a fresh interpreter has.

    Example:
        >>> with SpawnServer() as server:
        ...     pid = server.spawn(Task.function("json:dumps", 1))
        ...     _ = server.wait(pid, timeout=10)
    """

    def __init__(
        self, *, env: Mapping[str, str] | None = None, sys_path: Sequence[str] | None = None
    ) -> None:
        super().__init__()
        self._env = None if env is None else dict(env)
        self._sys_path = None if sys_path is None else list(sys_path)
        self._lock = threading.RLock()  # guards everything below
        self._exit_writer: socket.socket | None = None
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._ended: set[int] = set()
        self._waiters: list[threading.Thread] = []
        self._directories: list[str] = []
        self._tasks: str | None = None

    def start(self) -> None:
        """Nothing is imported ahead. See `Starter.start`."""
        with self._lock:
            if self._exit_writer is None:
                self._exit_socket, self._exit_writer = socket.socketpair()

    def spawn(
        self,
        task: Task,
        *,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        pass_fds: Sequence[int] = (),
    ) -> int:
        """Start a process. See `Starter.spawn`."""
        options: dict[str, Any] = {"start_new_session": True, "pass_fds": tuple(pass_fds)}
        if sys.platform == "win32":
            if pass_fds:
                raise LaunchError("pass_fds: descriptors can't be passed on on Windows")
            options = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
        with self._lock:
            self._exit_end()
            try:
                process = subprocess.Popen(
                    [*interpreter(), "-c", self._code(task)],
                    stdin=subprocess.DEVNULL if stdin is None else stdin,
                    stdout=output_of_child(1, stdout),
                    stderr=output_of_child(2, stderr),
                    cwd=task.cwd,
                    env=self._env if task.env is None else task.env,
                    **options,
                )
            except OSError as error:
                raise LaunchError(f"could not start a process: {error}") from error
            self._processes[process.pid] = process
            waiter = threading.Thread(
                target=self._report, args=(process,), name=f"zrpc-wait-{process.pid}", daemon=True
            )
            self._waiters.append(waiter)
            waiter.start()
        return process.pid

    def _code(self, task: Task) -> str:
        # A file holds a task of any size on every system. The child removes it.
        if self._tasks is None:
            self._tasks = tempfile.mkdtemp(prefix="zrpc-tasks-")
            self._directories.append(self._tasks)
        handle, path = tempfile.mkstemp(dir=self._tasks)
        with open(handle, "wb") as file:
            pickle.dump(task, file)
        return BOOTSTRAP.format(
            path=find_zrpc(self._sys_path),
            main=_BECOME.format(path=path, parent=os.getpid()),
        )

    def _report(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for one process and report its end; in a thread of its own."""
        if sys.platform == "win32":
            code = process.wait()
        else:
            # Left unreaped until `close`, so that its number, and its group's, stay its own.
            ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            assert ended is not None
            code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        with self._lock, contextlib.suppress(OSError):
            self._ended.add(process.pid)
            if self._exit_writer is not None:
                self._exit_writer.send(EXIT.pack(process.pid, code))

    def send_signal(self, pid: int, number: int, *, group: bool = False) -> bool:
        """Send a signal to a process that runs. See `Starter.send_signal`."""
        with self._lock:
            if pid not in self._processes or pid in self._ended:
                return False
            if sys.platform == "win32":
                if number == signal.SIGINT:
                    self._processes[pid].send_signal(signal.CTRL_BREAK_EVENT)
                else:
                    self._processes[pid].terminate()
            elif group:
                _kill_group(pid, number)
            else:
                os.kill(pid, number)
            return True

    def make_directory(self) -> str:
        """Make a private directory that `close` removes. See `Starter.make_directory`."""
        with self._lock:
            self._directories.append(short_directory())
            return self._directories[-1]

    def close(self, timeout: float = 10.0) -> None:
        """Kill all processes. See `Starter.close`."""
        with self._lock:
            processes, waiters = list(self._processes.values()), self._waiters
            for process in processes:
                if sys.platform == "win32":
                    process.kill()
                else:
                    _kill_group(process.pid, signal.SIGKILL)
        for waiter in waiters:
            waiter.join(timeout)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout)
        with self._lock:
            for sock in (self._exit_socket, self._exit_writer):
                if sock is not None:
                    sock.close()
            self._exit_socket = self._exit_writer = None
            for directory in self._directories:
                shutil.rmtree(directory, ignore_errors=True)
            self._processes, self._waiters, self._directories = {}, [], []
            self._tasks = None


if sys.platform != "win32":

    def _kill_group(pid: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number)


def become_task(path: str, parent: int, at_startup: Collection[str]) -> Callable[[], None]:
    """Get ready, in a new interpreter, to run the task in the file `path`.

    Args:
        path: The file, which is removed.
        parent: The process that spawned this one.
        at_startup: Names of the modules that every fresh interpreter has.

    Returns:
        What to call at the bottom of the stack.
    """
    prctl.die_with_parent(parent)
    with open(path, "rb") as file:
        task = pickle.load(file)
    os.unlink(path)
    return partial(child.become, task, at_startup)

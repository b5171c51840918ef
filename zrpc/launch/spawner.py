"""Starts each process as a new interpreter, on systems without a fork server."""

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
from types import MappingProxyType
from typing import Any

from zrpc.launch import child
from zrpc.launch.descriptors import move_descriptors, output_of_child
from zrpc.launch.short_directory import short_directory
from zrpc.launch.signal_state import SignalState
from zrpc.launch.starter import (
    EXIT_RECORD,
    LaunchError,
    Starter,
    Streams,
    python_command,
)
from zrpc.launch.task import Task

_LOAD_TASK = """\
from zrpc.launch.spawner import load_task
from zrpc.launch.signal_state import SignalState
load_task({path!r}, {parent}, {moved!r}, startup_modules, {given})()
"""


class SpawnServer(Starter):
    """The fork server's substitute: the same interface, a whole interpreter per process.

    Each process imports everything itself, and no server process watches them. If this process is
    killed, Linux also kills the processes (but not their children); other systems don't. On
    Linux a process is also killed when the *thread* that called `spawn` ends.

    Args:
        env: Default environment of the processes; None for a copy of this process's.
        given: The signals that the processes ignore and block; None for those that the thread
            which starts one does.

    Example:
        >>> with SpawnServer() as server:
        ...     pid = server.spawn(Task.function("json:dumps", 1))
        ...     _ = server.wait(pid, timeout=10)
    """

    def __init__(
        self, *, env: Mapping[str, str] | None = None, given: SignalState | None = None
    ) -> None:
        super().__init__()
        self._given = given
        self._env = None if env is None else dict(env)
        self._lock = threading.RLock()  # guards everything below
        self._exit_writer: socket.socket | None = None
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._ended: set[int] = set()
        self._waiters: list[threading.Thread] = []
        self._directories: list[str] = []
        self._task_directory: str | None = None

    def start(self) -> None:
        """Gets ready; preloads nothing. See `Starter.start`."""
        with self._lock:
            if self._exit_writer is None:
                self._exit_socket, self._exit_writer = socket.socketpair()

    def _spawn(self, task: Task, streams: Streams, pass_fds: Sequence[int]) -> int:
        stdin, stdout, stderr = streams
        options: dict[str, Any] = {"start_new_session": True, "pass_fds": tuple(pass_fds)}
        if sys.platform == "win32":
            if pass_fds:
                raise LaunchError("expected no pass_fds: Windows can't pass descriptors on")
            options = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
        with self._lock:
            self._require_exit_socket()
            try:
                process = subprocess.Popen(
                    python_command(self._code(task)),
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
        if self._task_directory is None:
            self._task_directory = self.make_directory()
        given = SignalState.current() if self._given is None else self._given
        return code_for(task, self._task_directory, given)

    def _report(self, process: subprocess.Popen[bytes]) -> None:
        """Waits for one process and reports its exit, in a thread of its own."""
        if sys.platform == "win32":
            code = process.wait()
        else:
            # Not reaped until `close`, so that nobody else gets its pid or its group's id.
            try:
                ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            except ChildProcessError:  # this process ignores SIGCHLD: nobody learns the exit code
                code = 0  # as `subprocess` reports it
            else:
                assert ended is not None
                code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        with self._lock, contextlib.suppress(OSError):
            self._ended.add(process.pid)
            if self._exit_writer is not None:
                self._exit_writer.send(EXIT_RECORD.pack(process.pid, code))

    def send_signal(self, pid: int, number: int, *, group: bool = False) -> bool:
        """Sends a signal to a running process. See `Starter.send_signal`."""
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
        """Makes a private directory that `close` removes. See `Starter.make_directory`."""
        with self._lock:
            self._directories.append(short_directory())
            return self._directories[-1]

    def close(self, timeout: float = 10.0) -> None:
        """Kills all processes. See `Starter.close`."""
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
            self._task_directory = None


if sys.platform != "win32":

    def _kill_group(pid: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number)


def code_for(
    task: Task,
    directory: str,
    given: SignalState,
    moved: Mapping[int, int] = MappingProxyType({}),
) -> str:
    """Returns the code with which a new interpreter, a child of this process, runs a task.

    A file in the directory holds the task, which may have any size. The child removes it. For
    `given` and `moved` see `load_task`.
    """
    handle, path = tempfile.mkstemp(dir=directory)
    with open(handle, "wb") as file:
        pickle.dump(task, file)
    return _LOAD_TASK.format(path=path, parent=os.getpid(), moved=dict(moved), given=given)


def load_task(
    path: str,
    parent: int,
    moved: Mapping[int, int],
    startup_modules: Collection[str],
    given: SignalState,
) -> Callable[[], None]:
    """Prepares a new interpreter, spawned by `parent`, to run the task in a file.

    Removes the file, and returns the program, to be called at the bottom of the stack. The keys of
    `moved` are descriptors, and the values their numbers in the program.
    """
    given.restore()
    child.die_with_parent(parent)
    move_descriptors(list(moved), list(moved.values()))
    with open(path, "rb") as file:
        task = pickle.load(file)
    os.unlink(path)
    return partial(child.become, task, startup_modules)

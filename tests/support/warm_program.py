"""What runs in a process that was forked with torch: a command, or a launcher's fork server."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from zrpc.launch import child
from zrpc.launch.channel import Channel
from zrpc.launch.server import serve as serve_requests
from zrpc.launch.starter import Starter
from zrpc.launch.task import Task

REPLY = struct.Struct("=q")
REPLY_SECONDS = 60.0
# An interpreter reads the variables whose names begin so when it starts, but not these. `python`
# reads PYTHONUNBUFFERED for the command that it has forked; torchrun reads PYTHON_EXEC.
READ_LATER = ("PYTHONBREAKPOINT", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", "PYTHON_EXEC")


def interpreter_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that an interpreter reads at its start."""
    return {k: v for k, v in env.items() if k.startswith("PYTHON") and k not in READ_LATER}


class ForkedProcess:
    """A process that another one has forked, with what `Starter` needs of a ``Popen``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode = 0
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._fd = -1

    def wait(self, timeout: float | None = None) -> int:
        if self._fd >= 0:
            if not select.select([self._fd], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a fork server", timeout or 0.0)
            os.close(self._fd)
            self._fd = -1
        return self.returncode

    def kill(self) -> None:
        if self._fd >= 0:
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)


def run(task: Task, startup_modules: Collection[str], commands: str, foreground: bool) -> None:
    """Runs a command as a fresh interpreter would.

    Args:
        task: the command.
        startup_modules: the modules of a fresh interpreter.
        commands: path of the socket of `WarmCommands`, which forks the fork servers of launchers.
        foreground: whether its standard input is a terminal, in whose foreground it should be.
    """
    if foreground:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    _limit_threads()
    _fork_servers_at(commands)
    child.become(task, startup_modules)


def serve(requests: int, exits: int, owner: int, startup_modules: Collection[str]) -> None:
    """Is a fork server, which has torch already."""
    _limit_threads()
    if "PYTHONUNBUFFERED" not in os.environ:
        _buffer_output()
    serve_requests(requests, exits, owner, startup_modules)()


def _limit_threads() -> None:
    """Does what torch does with the variable when it is imported."""
    if number := os.environ.get("OMP_NUM_THREADS"):
        sys.modules["torch"].set_num_threads(int(number))


def _buffer_output() -> None:
    """Makes children buffer their output, even if the tests don't.

    Without that, `print` writes the end of a line apart, and lines of two processes get mixed.
    """
    for fd, name in ((1, "__stdout__"), (2, "__stderr__")):
        errors = getattr(sys, name).errors
        setattr(sys, name, open(fd, "w", errors=errors, closefd=False))  # noqa: SIM115


def _fork_servers_at(commands: str) -> None:
    """Makes the fork servers of this process forked ones, too, if they would import torch."""
    start = Starter._start_process
    own = interpreter_variables(os.environ)

    def start_process(self: Starter, fds: Sequence[int]) -> Any:
        env = os.environ if self._env is None else self._env
        if not (self._forks and "torch" in self._preload) or interpreter_variables(env) != own:
            return start(self, fds)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(REPLY_SECONDS)
            sock.connect(commands)
            request = ("serve", os.getpid(), os.getcwd(), dict(env))
            Channel(sock).send(request, [*fds, 1, 2])
            (pid,) = REPLY.unpack(sock.recv(REPLY.size))
        return ForkedProcess(pid)

    Starter._start_process = start_process  # type: ignore[method-assign]

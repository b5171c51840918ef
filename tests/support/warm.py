"""Commands that are forked from a process which has imported torch.

A fresh interpreter needs two seconds of processor time to import torch, and ``zrpc launch`` has it
imported again by its fork server. Commands from `WarmCommands.directory` need some 50 ms: a small
program of the command's name asks for the fork, passes signals on, and exits as the command does.
Whatever else they start, and whatever an interpreter can't do after its start, is done afresh.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.warm_program import (
    READ_LATER,
    REPLY,
    REPLY_SECONDS,
    ForkedProcess,
    interpreter_variables,
)
from zrpc.launch.channel import Channel
from zrpc.launch.errors import LaunchError
from zrpc.launch.starter import Starter
from zrpc.launch.task import Task
from zrpc.testing.leaks import lasting
from zrpc.testing.server import warm_server

__all__ = ["FOREGROUND", "ForkedServer", "WarmCommands", "buffered", "warm_commands"]

# If this variable is 1, the command is in the foreground of the terminal that is its input.
FOREGROUND = "WARM_FOREGROUND"
_ROOT = str(Path(__file__).parents[2])
# What the commands import, and the examples.
_PRELOAD = (
    *("zrpc.cli.launch", "zrpc.cli.env", "zrpc.cli.stacks", "zrpc.autograd", "zrpc.optim"),
    *("torch.distributed.run", "torch.distributed.rpc", "torch.nn.parallel", "gymnasium"),
)
_PROGRAMS = ("python", "zrpc", "torchrun", "pytest")
# Above the numbers of what a preloaded module may have open in the server.
_FIRST_FD = 200
_FRESH = "import json, sys; print(json.dumps([sys.path[1:], sorted(sys.modules)]))"

# Runs with as few imports as possible: each costs every command.
_CLIENT = """\
#!{python} -IS
import _pickle, _signal, _socket, os, sys
def fresh():
    os.execv({real!r}, [{real!r}, *{before!r}, *sys.argv[1:]])
env = dict(os.environ)
if {{k: v for k, v in env.items() if k[:6] == "PYTHON" and k not in {later!r}}} != {variables!r}:
    fresh()
arguments = [*{before!r}, *sys.argv[1:]]
buffered = "PYTHONUNBUFFERED" not in env
if arguments[:1] == ["-u"]:
    buffered = False
    del arguments[0]
if arguments[:1] == ["-m"] and len(arguments) > 1:
    kind, arguments = "module", arguments[1:]
elif arguments and arguments[0][:1] != "-":
    kind = "script"
else:
    fresh()
foreground = env.pop({foreground!r}, "") == "1"
connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
connection.connect({path!r})
body = _pickle.dumps(("run", kind, arguments, os.getcwd(), env, buffered, foreground))
fds = b"".join(fd.to_bytes(4, sys.byteorder) for fd in range(3))
head = len(body).to_bytes(8, sys.byteorder)
connection.sendmsg([head], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, fds)])
connection.sendall(body)
def pass_on(number, _):
    try:
        connection.sendall(bytes([number]))
    except OSError:
        pass  # the command has ended
for number in {signals!r}:
    if _signal.getsignal(number) != _signal.SIG_IGN:
        _signal.signal(number, pass_on)
data = connection.recv(8)
code = int.from_bytes(data, sys.byteorder, signed=True) if data else 254
if code < 0:
    _signal.signal(-code, _signal.SIG_DFL) if -code not in (9, 19) else None
    os.kill(os.getpid(), -code)
os._exit(code & 255)
"""


class WarmCommands:
    """Forks commands, in a thread of its own, until this process exits.

    Attributes:
        directory: has the programs ``python``, ``zrpc``, ``torchrun`` and ``pytest``.
        python: the path of the first.
    """

    def __init__(self) -> None:
        home = Path(warm_server().make_directory())  # removed even if this process is killed
        self.directory = home / "bin"
        self.directory.mkdir()
        self.python = str(self.directory / "python")
        self._path = str(home / "socket")
        self._sys_path, self._startup_modules = _fresh_interpreter()
        self._server = ForkedServer(preload=_PRELOAD)
        self._server.start()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self._path)
        self._listener.listen(128)
        self._wake, self._woken = os.pipe()
        self._selector = selectors.DefaultSelector()
        for source in (self._listener, self._server, self._wake):
            self._selector.register(source, selectors.EVENT_READ)
        # The connection of each command, and its process. Only the thread uses these.
        self._commands: dict[socket.socket, int] = {}
        for name in _PROGRAMS:
            self._write_client(name)
        self._thread = threading.Thread(target=self._serve, name="warm-commands", daemon=True)
        self._thread.start()

    def environment(self, base: Mapping[str, str] = os.environ) -> dict[str, str]:
        """An environment in which these are the commands that are found, by torchrun, too."""
        path = os.pathsep.join((str(self.directory), os.path.dirname(sys.executable), base["PATH"]))
        # pytest warns of a plugin that is imported before it starts, as zrpc is here.
        options = f"{base.get('PYTEST_ADDOPTS', '')} -W ignore::pytest.PytestAssertRewriteWarning"
        more = {"PATH": path, "PYTHON_EXEC": self.python, "PYTEST_ADDOPTS": options}
        return buffered({**base, **more})

    def close(self) -> None:
        os.close(self._woken)
        self._thread.join(REPLY_SECONDS)
        self._listener.close()
        self._server.close()

    def _write_client(self, name: str) -> None:
        real = Path(sys.executable).with_name(name)
        client = self.directory / name
        client.write_text(
            _CLIENT.format(
                python=sys.executable,
                real=sys.executable,
                before=[] if name == "python" else [str(real)],
                later=READ_LATER,
                foreground=FOREGROUND,
                variables=interpreter_variables(os.environ),
                path=self._path,
                signals=[int(n) for n in _PASSED_ON],
            )
        )
        client.chmod(0o755)

    def _serve(self) -> None:
        while True:
            ready = {key.fileobj for key, _ in self._selector.select()}
            if self._wake in ready:
                return
            if self._server in ready:
                self._on_exits()
            if self._listener in ready:
                self._on_request()
            for connection in ready & set(self._commands):
                self._on_signals(connection)  # type: ignore[arg-type]

    def _on_request(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(REPLY_SECONDS)
        try:
            request, fds = Channel(connection).receive()
        except (EOFError, OSError):  # the client was killed meanwhile
            connection.close()
            return
        lifted = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FD) for fd in fds]
        try:
            match request:
                case ("run", kind, words, cwd, env, buffered, foreground):
                    task = Task(kind, words[0], tuple(words[1:]), line_buffered=not buffered)
                    pid = self._run(task, cwd, env, foreground, lifted)
                    self._commands[connection] = pid
                    self._selector.register(connection, selectors.EVENT_READ)
                case ("serve", owner, cwd, env):
                    connection.sendall(REPLY.pack(self._fork_server(owner, cwd, env, lifted)))
                    connection.close()
        except (LaunchError, OSError) as error:
            os.write(lifted[2], f"the command could not be forked: {error}\n".encode())
            connection.close()
        finally:
            for fd in (*fds, *lifted):
                os.close(fd)

    def _run(
        self, task: Task, cwd: str, env: dict[str, str], foreground: bool, fds: list[int]
    ) -> int:
        outer = Task.function(
            "tests.support.warm_program:run", task, self._startup_modules, self._path, foreground
        ).within(cwd=cwd, env=env, sys_path=self._sys_path)
        stdin, stdout, stderr = fds
        return self._server.spawn(outer, stdin=stdin, stdout=stdout, stderr=stderr)

    def _fork_server(self, owner: int, cwd: str, env: dict[str, str], fds: list[int]) -> int:
        requests, exits, stdout, stderr = fds
        task = Task.function(
            *("tests.support.warm_program:serve", requests, exits, owner, self._startup_modules),
        ).within(cwd=cwd, env=env, sys_path=self._sys_path)
        return self._server.spawn(task, stdout=stdout, stderr=stderr, pass_fds=[requests, exits])

    def _on_exits(self) -> None:
        codes = {found.pid: found.returncode for found in self._server.exits()}
        for connection, pid in list(self._commands.items()):
            if pid in codes:
                with contextlib.suppress(OSError):  # its client was killed
                    connection.sendall(REPLY.pack(codes[pid]))
                self._forget(connection)

    def _on_signals(self, connection: socket.socket) -> None:
        if (pid := self._commands.get(connection)) is None:
            return  # it has exited
        try:
            numbers = connection.recv(64)
        except OSError:
            numbers = b""
        if not numbers:  # the client was killed
            self._server.send_signal(pid, signal.SIGKILL, group=True)
            self._forget(connection)
        for number in numbers:
            self._server.send_signal(pid, number)

    def _forget(self, connection: socket.socket) -> None:
        del self._commands[connection]
        self._selector.unregister(connection)
        connection.close()


_PASSED_ON = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)


class ForkedServer(Starter):
    """A fork server that is forked from `warm_server`, which has imported torch.

    Its directory, and what it imports, are those of a server that starts afresh.
    """

    def _start_process(self, fds: Sequence[int]) -> Any:
        sys_path, startup_modules = _fresh_interpreter()
        lifted = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FD) for fd in fds]
        task = Task.function(
            "tests.support.warm_program:serve", *lifted, os.getpid(), startup_modules
        ).within(
            cwd=os.getcwd(),
            env=buffered(os.environ if self._env is None else self._env),
            sys_path=[_ROOT, *sys_path],
        )
        try:
            return ForkedProcess(warm_server().spawn(task, pass_fds=lifted))
        finally:
            for fd in lifted:
                os.close(fd)


def buffered(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without a variable that mixes the lines of two processes.

    With it, `print` writes the end of a line apart.
    """
    return {k: v for k, v in env.items() if k != "PYTHONUNBUFFERED"}


@cache
def _fresh_interpreter() -> tuple[list[str], list[str]]:
    """Returns the search path and the modules of an interpreter that has just started."""
    done = subprocess.run([sys.executable, "-c", _FRESH], capture_output=True, check=True)
    path, modules = json.loads(done.stdout)
    return path, modules


@cache
def warm_commands() -> WarmCommands:
    """Returns this process's, and starts them on the first call."""
    with lasting():
        commands = WarmCommands()
    atexit.register(commands.close)
    return commands

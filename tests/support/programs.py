"""Scripts in processes of their own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

from tests.support.warm import warm_commands
from zrpc.launch.task import Task
from zrpc.testing.leaks import files_in
from zrpc.testing.server import warm_server

# The longest program computes for a minute, and for five on a machine with load 10.
SCRIPT_DEADLINE = 600.0


# What a launcher, if one has started pytest, would tell the programs.
_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


def run_python(
    *arguments: str, cwd: Path | None = None, stdin: str = "", warm: bool = False, **env: str
) -> subprocess.CompletedProcess[str]:
    """Runs a Python command; ``warm`` forks it from a process that has imported torch."""
    inherited = {key: value for key, value in os.environ.items() if key not in _LAUNCHED}
    return subprocess.run(
        [warm_commands().python if warm else sys.executable, *arguments],
        cwd=cwd,
        env={**inherited, **env},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=SCRIPT_DEADLINE,
    )


class Forked:
    """Scripts that are forked from the warm server, and then run as under ``python script.py``."""

    def __init__(self) -> None:
        self.pids: set[int] = set()

    def start(
        self,
        script: Path | str,
        arguments: Sequence[str] = (),
        *,
        env: Mapping[str, str],
        out: Path,
        err: Path | None = None,
        cwd: Path | None = None,
    ) -> int:
        """Starts a script that appends to these files, to one if `err` is None; its process id."""
        task = Task.script(str(script), arguments).within(
            cwd=None if cwd is None else str(cwd), env=dict(env), line_buffered=True
        )
        with ExitStack() as files:
            stdout = files.enter_context(out.open("ab")).fileno()
            stderr = stdout if err is None else files.enter_context(err.open("ab")).fileno()
            pid = warm_server().spawn(task, stdout=stdout, stderr=stderr)
        self.pids.add(pid)
        return pid

    def wait(self, pid: int, timeout: float) -> int:
        """Waits for a script's end and returns its exit code."""
        code = warm_server().wait(pid, timeout)
        self.pids.discard(pid)
        return code

    def send_signal(self, number: int, *, group: bool = False) -> None:
        """Sends a signal to all that have not been waited for."""
        for pid in self.pids:
            warm_server().send_signal(pid, number, group=group)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL, group=True)
        for pid in list(self.pids):
            self.wait(pid, 5)


@dataclass
class Ended:
    """A process that has ended: its exit code, and all that it has written."""

    code: int
    output: str


class Programs:
    """Runs scripts as the workers of a mesh, each in a process of its own.

    At the end of the test no socket file of theirs may be left.
    """

    def __init__(self, directory: Path, port: int) -> None:
        self.directory = directory
        self.port = port
        self.runtime = Path(tempfile.mkdtemp(prefix="zrpc-test-"))  # a short path, for sockets
        self._forked = Forked()
        self._cold: subprocess.Popen[bytes] | None = None

    def env(self, rank: int, world_size: int, **more: str) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC")}
        return {
            **inherited,
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "ZRPC_RUNTIME_DIR": str(self.runtime),
            **more,
        }

    def write(self, source: str, name: str = "script.py") -> Path:
        path = self.directory / name
        path.write_text(dedent(source))
        return path

    def start(self, source: str, rank: int, world_size: int, **env: str) -> int:
        """Starts one worker; returns its process id."""
        path = self.write(source, f"script{len(list(self.directory.glob('script*')))}.py")
        return self.start_script(path, rank, world_size, **env)

    def start_script(self, path: Path, rank: int, world_size: int, **env: str) -> int:
        environment = self.env(rank, world_size, **env)
        return self._forked.start(path, env=environment, out=self._output(rank), cwd=self.directory)

    def wait(self, pid: int, rank: int) -> Ended:
        return Ended(self._forked.wait(pid, SCRIPT_DEADLINE), self.output(rank))

    def output(self, rank: int) -> str:
        return self._output(rank).read_text(errors="replace")

    def run(
        self, source: str, world_size: int = 2, *, stop_others: bool = True, **env: str
    ) -> list[Ended]:
        """Runs one script as all workers, and ends the rest if one fails.

        Returns their exit codes and what they have written, by rank.
        """
        path = self.write(source)
        pids = [self.start_script(path, rank, world_size, **env) for rank in range(world_size)]
        ended = []
        for rank, pid in enumerate(pids):
            ended.append(self.wait(pid, rank))
            if ended[-1].code != 0 and stop_others:  # the others may wait for it
                self._forked.send_signal(signal.SIGTERM)
        return ended

    def run_cold(self, source: str, world_size: int = 2, **env: str) -> list[Ended]:
        """The same, with rank 0 in a fresh interpreter, and all that this does at its end."""
        path = self.write(source)
        pids = [self.start_script(path, rank, world_size, **env) for rank in range(1, world_size)]
        with self._output(0).open("wb") as output:
            self._cold = subprocess.Popen(
                [sys.executable, str(path)],
                cwd=self.directory,
                env=self.env(0, world_size, **env),
                stdout=output,
                stderr=output,
            )
        first = Ended(self._cold.wait(SCRIPT_DEADLINE), self.output(0))
        return [first, *(self.wait(pid, rank) for rank, pid in enumerate(pids, 1))]

    def left(self) -> list[str]:
        return files_in(self.runtime)

    def close(self) -> None:
        self._forked.kill()
        if self._cold is not None and self._cold.poll() is None:
            self._cold.kill()
            self._cold.wait()
        shutil.rmtree(self.runtime, ignore_errors=True)

    def _output(self, rank: int) -> Path:
        return self.directory / f"output{rank}"

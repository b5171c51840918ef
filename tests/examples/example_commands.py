"""Examples run by the commands that users type, each with a deadline."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from zrpc.launch import Starter, Task

EXAMPLES = Path(__file__).parents[2] / "examples"
DEADLINE = 120.0
_LAUNCHERS_OWN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")


@dataclass
class Outcome:
    """What a command came to."""

    code: int
    out: str
    err: str

    def __str__(self) -> str:
        return f"exit code {self.code}\n{self.out}\n{self.err}"


class Commands:
    """Commands under way; all are ended with the test."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *command: str | Path, **variables: str) -> subprocess.Popen[str]:
        """Starts this Python with a command line, in a process group of its own."""
        inherited = {k: v for k, v in os.environ.items() if k not in _LAUNCHERS_OWN}
        process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            env={**inherited, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def launch(self, nprocs: int, *script: str | Path) -> subprocess.Popen[str]:
        """Starts ``zrpc launch``."""
        return self.start("-m", "zrpc.cli", "launch", "--nprocs", str(nprocs), *script)

    def stop(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
                process.communicate()


class Scripts:
    """Scripts under way, as after ``python script.py``, but with torch imported already.

    Args:
        starter: forks them.
        directory: for what they write.
    """

    def __init__(self, starter: Starter, directory: Path) -> None:
        self._starter = starter
        self._directory = directory
        self._pids: list[int] = []

    def start(self, script: str | Path, *arguments: str, **variables: str) -> None:
        """Starts one more."""
        inherited = {k: v for k, v in os.environ.items() if k not in _LAUNCHERS_OWN}
        task = Task.script(str(script), arguments).within(env={**inherited, **variables})
        number = len(self._pids)
        with (
            self._file(number, "out").open("wb") as out,
            self._file(number, "err").open("wb") as err,
        ):
            pid = self._starter.spawn(task, stdout=out.fileno(), stderr=err.fileno())
        self._pids.append(pid)

    def finish(self, deadline: float) -> list[Outcome]:
        """Waits until all have ended; what came of each, in the order of their start."""
        end = time.monotonic() + deadline
        codes = [self._starter.wait(pid, max(0.0, end - time.monotonic())) for pid in self._pids]
        self._pids.clear()
        return [
            Outcome(code, *(self._file(number, kind).read_text() for kind in ("out", "err")))
            for number, code in enumerate(codes)
        ]

    def stop(self) -> None:
        for pid in self._pids:
            self._starter.send_signal(pid, signal.SIGKILL, group=True)
            self._starter.wait(pid, 5)

    def _file(self, number: int, kind: str) -> Path:
        return self._directory / f"script{number}.{kind}"


def finish(process: subprocess.Popen[str], deadline: float = DEADLINE) -> Outcome:
    """Waits for a command's end."""
    out, err = process.communicate(timeout=deadline)
    return Outcome(process.returncode, out, err)

"""Examples run by the commands that users type, each with a deadline."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

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


def finish(process: subprocess.Popen[str], deadline: float = DEADLINE) -> Outcome:
    """Waits for a command's end."""
    out, err = process.communicate(timeout=deadline)
    return Outcome(process.returncode, out, err)

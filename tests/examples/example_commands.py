"""Runs the examples with the commands that users type, each with a deadline."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.docs.pages import ROOT, blocks
from tests.support.warm import warm_commands

EXAMPLES = ROOT / "examples"
PAGE = ROOT / "docs" / "examples.md"
DEADLINE = 400.0  # seconds
Outcome = subprocess.CompletedProcess[str]
Launch = Callable[..., str]
RunPlainly = Callable[..., list[Outcome]]
# Not the numbers in names, such as `worker1`, and not ranks, such as `[1]`.
_NUMBER = re.compile(r"(?<![\w\[.])-?\d[\d,.]*(?:e[+-]\d+)?(?![\w\]])")
_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")


class Commands:
    """Running commands; all are killed at the end of the test."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *command: str | Path, **variables: str) -> subprocess.Popen[str]:
        """Starts Python, which has imported torch, with a command line, in a new process group."""
        warm = warm_commands()
        inherited = {k: v for k, v in os.environ.items() if k not in _LAUNCHER_VARIABLES}
        process = subprocess.Popen(
            [warm.python, *map(str, command)],
            env=warm.environment({**inherited, **variables}),
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


def finish(process: subprocess.Popen[str]) -> Outcome:
    """Waits until a command exits."""
    out, err = process.communicate(timeout=DEADLINE)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def shown() -> dict[str, tuple[str, list[str]]]:
    """Returns the command and the output that the page of examples shows of each."""
    sessions = {}
    for block in blocks(PAGE):
        command, *lines = block.text.splitlines()
        name = re.search(r"examples/(\w+)\.py", command)
        assert name is not None, command
        sessions[name[1]] = command.removeprefix("$ "), [each for each in lines if each != "..."]
    return sessions


def not_printed(lines: list[str], output: str) -> list[str]:
    """Returns the lines that are not in an output, whatever their numbers are."""
    printed = {_without_numbers(line) for line in output.splitlines()}
    return [line for line in lines if _without_numbers(line) not in printed]


def _without_numbers(line: str) -> str:
    return " ".join(_NUMBER.sub("N", line).split())


def losses(output: str, rank: int | None = None) -> list[float]:
    """Returns the losses of all steps that a rank has printed, or all ranks."""
    begin = "" if rank is None else rf"^\[{rank}\] "
    return [float(loss) for loss in re.findall(rf"{begin}step +\d+ +loss ([\d.]+)$", output, re.M)]


def number_in(pattern: str, output: str) -> float:
    """Returns the number that a pattern finds in an output."""
    found = re.search(pattern, output, re.M)
    assert found is not None, output
    return float(found[1])

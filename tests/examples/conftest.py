"""Ways to run an example."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.examples.example_commands import EXAMPLES, Commands, Outcome, finish, not_printed, shown


@pytest.fixture
def commands() -> Iterator[Commands]:
    running = Commands()
    yield running
    running.stop()


@pytest.fixture
def launch(commands: Commands) -> Callable[..., str]:
    """Runs an example with ``zrpc launch``; returns its output, which is like that of its page."""

    def launch(name: str, nprocs: int, *arguments: str) -> str:
        outcome = finish(commands.launch(nprocs, EXAMPLES / f"{name}.py", *arguments))
        assert outcome.returncode == 0, outcome
        assert "Traceback" not in outcome.stderr
        _, lines = shown()[name]
        assert not_printed(lines, outcome.stdout) == [], outcome
        return outcome.stdout

    return launch


@pytest.fixture
def run_plainly(commands: Commands, free_port: int) -> Callable[..., list[Outcome]]:
    """Runs a script in processes without a launcher: only variables connect them."""

    def run(nprocs: int, *script: str | Path) -> list[Outcome]:
        variables = {
            "WORLD_SIZE": str(nprocs),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port),
        }
        started = [commands.start(*script, **variables, RANK=str(rank)) for rank in range(nprocs)]
        # None of them writes more than a pipe holds.
        return [finish(process) for process in started]

    return run


@pytest.fixture
def run_first(commands: Commands) -> Callable[..., Outcome]:
    """Runs a script as rank 0 of ``nprocs`` workers; the others are not started."""

    def run(nprocs: int, *script: str | Path) -> Outcome:
        return finish(commands.start(*script, RANK="0", WORLD_SIZE=str(nprocs)))

    return run

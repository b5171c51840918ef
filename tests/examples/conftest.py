"""Ways to run an example."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.examples.example_commands import (
    EXAMPLES,
    Commands,
    Launch,
    Outcome,
    RunPlainly,
    finish,
    not_printed,
    shown,
)


@pytest.fixture
def commands() -> Iterator[Commands]:
    running = Commands()
    yield running
    running.stop()


@pytest.fixture
def launch(commands: Commands) -> Launch:
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
def run_plainly(commands: Commands, free_port: int) -> RunPlainly:
    """Runs a script in processes without a launcher, all or some: only variables connect them."""

    def run(nprocs: int, *script: str | Path, started: int | None = None) -> list[Outcome]:
        variables = {
            "WORLD_SIZE": str(nprocs),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port),
        }
        ranks = range(nprocs if started is None else started)
        processes = [commands.start(*script, **variables, RANK=str(rank)) for rank in ranks]
        # None of them writes more than a pipe holds.
        return [finish(process) for process in processes]

    return run

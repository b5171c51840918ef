"""Ways to run an example."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.examples.example_commands import (
    DEADLINE,
    EXAMPLES,
    Commands,
    Outcome,
    finish,
    finish_all,
    not_printed,
    shown,
)


@pytest.fixture
def commands() -> Iterator[Commands]:
    running = Commands()
    yield running
    running.stop()


@pytest.fixture
def launch(commands: Commands) -> Callable[..., Outcome]:
    """Runs an example with ``zrpc launch``, and checks that it prints what its page shows."""

    def launch(name: str, nprocs: int, *arguments: str, deadline: float = DEADLINE) -> Outcome:
        outcome = finish(commands.launch(nprocs, EXAMPLES / f"{name}.py", *arguments), deadline)
        if outcome.code == 0:
            _, lines = shown()[name]
            assert not_printed(lines, outcome.out) == [], outcome
        return outcome

    return launch


@pytest.fixture
def run_plainly(commands: Commands, free_port: int) -> Callable[..., list[Outcome]]:
    """Runs a script in processes without a launcher: only variables connect them."""

    def run(nprocs: int, *script: str | Path, deadline: float = DEADLINE) -> list[Outcome]:
        variables = {
            "WORLD_SIZE": str(nprocs),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port),
        }
        started = [commands.start(*script, **variables, RANK=str(rank)) for rank in range(nprocs)]
        return finish_all(started, deadline)

    return run


@pytest.fixture
def run_first(commands: Commands) -> Callable[[str, int], Outcome]:
    """Runs an example as rank 0 of ``nprocs`` workers; the others are not started."""

    def run(name: str, nprocs: int) -> Outcome:
        return finish(commands.start(EXAMPLES / f"{name}.py", RANK="0", WORLD_SIZE=str(nprocs)))

    return run


@pytest.fixture
def torchrun(commands: Commands) -> Callable[..., Outcome]:
    """Runs a script with ``torchrun`` until it exits."""

    def run(nprocs: int, *script: str | Path) -> Outcome:
        options = ("--standalone", "--nproc-per-node", str(nprocs))
        return finish(commands.start("-m", "torch.distributed.run", *options, *script))

    return run

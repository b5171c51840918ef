"""Ways to run an example."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from example_commands import DEADLINE, EXAMPLES, Commands, Outcome, finish


@pytest.fixture
def commands() -> Iterator[Commands]:
    running = Commands()
    yield running
    running.stop()


@pytest.fixture
def example() -> Callable[[str], Path]:
    """The path of an example, by its name."""
    return lambda name: EXAMPLES / f"{name}.py"


@pytest.fixture
def launch(commands: Commands, example: Callable[[str], Path]) -> Callable[..., Outcome]:
    """Runs an example by ``zrpc launch`` to its end."""

    def launch(name: str, nprocs: int, *arguments: str, deadline: float = DEADLINE) -> Outcome:
        return finish(commands.launch(nprocs, example(name), *arguments), deadline)

    return launch


@pytest.fixture
def run_plainly(commands: Commands) -> Callable[..., list[Outcome]]:
    """Runs a script in processes that know each other by variables alone."""

    def run(nprocs: int, *script: str | Path, deadline: float = DEADLINE) -> list[Outcome]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        variables = {
            "WORLD_SIZE": str(nprocs),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        processes = [commands.start(*script, **variables, RANK=str(rank)) for rank in range(nprocs)]
        end = time.monotonic() + deadline
        return [finish(process, end - time.monotonic()) for process in processes]

    return run


@pytest.fixture
def torchrun(commands: Commands) -> Callable[..., Outcome]:
    """Runs a script by ``torchrun`` to its end."""

    def run(nprocs: int, *script: str | Path) -> Outcome:
        options = ("--standalone", "--nproc-per-node", str(nprocs))
        return finish(commands.start("-m", "torch.distributed.run", *options, *script))

    return run

"""Programs on two hosts of this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.partitions.network import Switch, address_of, connected
from tests.support.programs import Forked
from tests.transport.numbered import connect, opened
from tests.transport.two_hosts import ENTER, SOON, Host
from zrpc.cli import main
from zrpc.transport.network import Network

PORT = 29_400  # of the master: all are free in a new namespace


@pytest.fixture(scope="module")
def connected_hosts(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[list[Host], Switch]]:
    with connected(2, PORT) as (names, switch):
        yield [Host(name, tmp_path_factory.mktemp("host")) for name in names], switch


@pytest.fixture
def switch(connected_hosts: tuple[list[Host], Switch]) -> Iterator[Switch]:
    """The switch between the hosts, which lets all packets arrive at first."""
    switch = connected_hosts[1]
    yield switch
    switch.mend()


class Workers:
    """A program that runs on each host."""

    def __init__(self, hosts: list[Host], directory: Path) -> None:
        self._hosts = hosts  # of each, by rank
        self._directory = directory
        self._forked = Forked()
        self.pids: list[int] = []

    def start(self, program: str, *variables: dict[str, str]) -> None:
        """Starts a worker on each host, with these environment variables."""
        (self._directory / "worker.py").write_text(ENTER + program)
        self.pids = [self._start(rank, each) for rank, each in enumerate(variables)]

    def _start(self, rank: int, variables: dict[str, str]) -> int:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("ZRPC_")}
        env = {
            **inherited,
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": address_of(0),
            "MASTER_PORT": str(PORT),
            "NAMESPACE": self._hosts[rank].namespace,
            "ZRPC_RUNTIME_DIR": str(self._hosts[rank].runtime),
            **variables,
        }
        script = self._directory / "worker.py"
        output = self._directory / f"output{rank}"
        return self._forked.start(script, env=env, out=output, cwd=self._directory)

    def outcomes(self) -> list[tuple[int, str]]:
        """Waits for the workers; returns their exit codes and outputs."""
        codes = [self._forked.wait(pid, SOON) for pid in self.pids]
        return [(code, self.output(rank)) for rank, code in enumerate(codes)]

    def command(self, *words: str) -> str:
        """Runs a command of ``zrpc`` for worker 0, on its host; returns what it prints."""
        env = {"ZRPC_RUNTIME_DIR": str(self._hosts[0].runtime)}
        return CliRunner(env=env).invoke(main, [*words, str(self.pids[0])]).output

    def output(self, rank: int) -> str:
        return (self._directory / f"output{rank}").read_text()

    def kill(self) -> None:
        self._forked.kill()


@pytest.fixture
def start_workers(
    connected_hosts: tuple[list[Host], Switch], tmp_path: Path
) -> Iterator[Callable[..., Workers]]:
    """Starts a worker on each of these hosts; kills those that still run after the test."""
    started: list[Workers] = []

    def start(program: str, *variables: dict[str, str], on: Sequence[int] = (0, 1)) -> Workers:
        workers = Workers([connected_hosts[0][host] for host in on], tmp_path)
        started.append(workers)
        workers.start(program, *variables)
        return workers

    yield start
    for workers in started:
        workers.kill()


@pytest.fixture
def networks(no_leaks: None) -> Iterator[list[Network]]:
    """Yields three networks that know each other."""
    with opened(3) as networks:
        connect(networks)
        yield networks

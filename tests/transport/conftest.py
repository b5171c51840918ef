"""Programs on two hosts of this machine."""

from __future__ import annotations

import os

import pytest
from two_hosts import ADDRESSES, ENTER, SOON, Host

from zrpc.launch.task import Task
from zrpc.testing.processes import warm_server


@pytest.fixture
def free_port() -> int:
    # The namespaces are new, so that all are free; and a later test must not meet an earlier.
    return 20_000 + int.from_bytes(os.urandom(2), "little") % 10_000


class Workers:
    """A program that runs on each host."""

    def __init__(self, hosts: list[Host], directory, port: int) -> None:
        self._hosts = hosts
        self._directory = directory
        self._port = port
        self._pids: list[int] = []

    def start(self, program: str, *variables: dict[str, str]) -> None:
        """Starts a worker on each host, with these variables."""
        (self._directory / "worker.py").write_text(ENTER + program)
        self._pids = [self._start(rank, each) for rank, each in enumerate(variables)]

    def _start(self, rank: int, variables: dict[str, str]) -> int:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("ZRPC_")}
        env = {
            **inherited,
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": ADDRESSES[0],
            "MASTER_PORT": str(self._port),
            "NAMESPACE": self._hosts[rank].namespace,
            "ZRPC_RUNTIME_DIR": str(self._hosts[rank].runtime),
            **variables,
        }
        script = str(self._directory / "worker.py")
        task = Task.script(script).within(cwd=str(self._directory), env=env, line_buffered=True)
        with (self._directory / f"output{rank}").open("wb") as output:
            return warm_server().spawn(task, stdout=output.fileno(), stderr=output.fileno())

    def outcomes(self) -> list[tuple[int, str]]:
        """Waits for the ends; the exit codes and outputs."""
        codes = [warm_server().wait(pid, SOON) for pid in self._pids]
        self._pids = []
        return [(code, self.output(rank)) for rank, code in enumerate(codes)]

    def output(self, rank: int) -> str:
        return (self._directory / f"output{rank}").read_text()

    def kill(self) -> None:
        for pid in self._pids:
            if warm_server().send_signal(pid, 9):
                warm_server().wait(pid, SOON)


@pytest.fixture
def start_workers(tmp_path, free_port):
    """Has workers started on hosts; those that still run after the test are killed."""
    started: list[Workers] = []

    def start(hosts: list[Host], program: str, *variables: dict[str, str]) -> Workers:
        workers = Workers(hosts, tmp_path, free_port)
        started.append(workers)
        workers.start(program, *variables)
        return workers

    yield start
    for workers in started:
        workers.kill()

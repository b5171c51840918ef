"""torchrun starts workers on several nodes, here several agents on one machine."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engines.conftest import SECONDS, engine_environment
from tests.support.warm import warm_commands

pytestmark = pytest.mark.engine
WORKER = Path(__file__).with_name("restarted.py")
TORCHRUN = ("-m", "torch.distributed.run")
Run = Callable[..., list[str]]


@pytest.fixture(params=["static", "c10d"])
def rendezvous(request: pytest.FixtureRequest, free_port: int) -> list[str]:
    """How the agents meet."""
    if request.param == "static":
        return ["--master-addr", "127.0.0.1", "--master-port", str(free_port)]
    endpoint = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port}"]
    # An agent that a busy machine keeps from running for a while is not given up: torchrun would
    # start all workers again.
    patience = ["--rdzv-conf", f"keep_alive_max_attempt={SECONDS}"]
    return [*endpoint, *patience, "--rdzv-id", "test", "--local-addr", "127.0.0.1"]


@pytest.fixture
def run(rendezvous: list[str], tmp_path: Path) -> Iterator[Run]:
    """Runs an agent for each node; returns the sorted lines of all workers."""
    agents: list[subprocess.Popen[str]] = []

    def run(nodes: int, workers: int, *options: str, fail: bool = False) -> list[str]:
        warm = warm_commands()
        for node in range(nodes):
            place = ["--nnodes", str(nodes), "--node-rank", str(node), *rendezvous, *options]
            command = [warm.python, *TORCHRUN, *place, "--nproc-per-node", str(workers)]
            agents.append(
                subprocess.Popen(
                    [*command, str(WORKER), *(["fail"] if fail else [])],
                    env=warm.environment(engine_environment(OMP_NUM_THREADS="1")),
                    cwd=tmp_path,
                    stdout=subprocess.PIPE,
                    stderr=(tmp_path / f"errors{node}").open("w"),
                    text=True,
                )
            )
        outputs = [agent.communicate(timeout=3 * SECONDS)[0] for agent in agents]
        errors = [(tmp_path / f"errors{node}").read_text() for node in range(nodes)]
        assert [agent.returncode for agent in agents] == [0] * nodes, "\n".join(outputs + errors)
        return sorted("".join(outputs).splitlines())

    yield run
    for agent in agents:
        agent.kill()
        agent.wait(SECONDS)


def meshes(lines: list[str]) -> dict[str, list[str]]:
    """The workers that have printed the same process ids, by these."""
    found: dict[str, list[str]] = {}
    for line in lines:
        name, _, size, pids = line.split(maxsplit=3)
        found.setdefault(pids, []).append(f"{name} of {size}")
    return found


def test_workers_of_several_nodes_meet(run: Run) -> None:
    found = meshes(run(3, 1))
    assert list(found.values()) == [[f"worker{rank} of 3" for rank in range(3)]], found


def test_all_start_again_if_one_fails(run: Run) -> None:
    """They meet in a new mesh, in which nobody takes another for a worker of the first round."""
    found = meshes(run(2, 2, "--max-restarts", "3", fail=True))
    assert list(found.values()) == [[f"worker{rank} of 4" for rank in range(4)]] * 2
    first, second = (set(pids.split()) for pids in found)
    assert not first & second

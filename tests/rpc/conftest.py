"""What the tests of calls share."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from rpc_programs import Ended, Programs

import zrpc
from zrpc.testing import Mesh, local_mesh
from zrpc.testing.processes import warm_server

# Seconds, on a busy machine.
_INTRODUCED_WITHIN = 20.0


@pytest.fixture
def caller(mesh: Mesh) -> Iterator[Mesh]:
    """The mesh, with worker0 as the worker that the test itself is."""
    with mesh.agent(0).as_current():
        yield mesh


@pytest.fixture(scope="module")
def _module_mesh() -> Iterator[Mesh]:
    with local_mesh(2, timeout=60, options={"rpc_timeout": 20}) as mesh:
        _introduce(mesh)
        yield mesh


def _introduce(mesh: Mesh) -> None:
    """Has the two workers open all their connections, heartbeats too.

    Later, they would seem to be left behind by some test with a mesh of its own.
    """
    agents = [mesh.agent(rank) for rank in range(2)]
    for rank, agent in enumerate(agents):
        mesh.run(rank, zrpc.rpc_sync, 1 - rank, max, (1, 2))
        mesh.run(rank, zrpc.rpc_sync, rank, max, (1, 2))
        detector = agent._watch._detector
        limit = time.monotonic() + _INTRODUCED_WITHIN
        while not detector.watches(1 - rank) or detector.suspects(1 - rank):
            assert time.monotonic() < limit, "no heartbeat was answered"
            time.sleep(0.01)


@pytest.fixture
def shared(_module_mesh: Mesh) -> Iterator[Mesh]:
    """As `caller`, with two workers that all tests of a module share: for what leaves no trace."""
    with _module_mesh.agent(0).as_current():
        yield _module_mesh


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def programs(tmp_path: Path, free_port: int) -> Iterator[Programs]:
    warm_server()  # its start is not the test's time
    running = Programs(tmp_path, free_port)
    yield running
    running.close()


@pytest.fixture
def succeed(programs: Programs) -> Callable[..., list[str]]:
    """Runs a script as all workers, which must all exit with 0 and leave nothing behind."""

    def run(source: str, world_size: int = 2, *, cold: bool = False, **env: Any) -> list[str]:
        ended = (programs.run_cold if cold else programs.run)(source, world_size, **env)
        assert [e.code for e in ended] == [0] * world_size, _report(ended)
        assert programs.left() == [], _report(ended)
        return [e.output for e in ended]

    return run


def _report(ended: Sequence[Ended]) -> str:
    return "\n".join(f"-- rank {i}: {e.code}\n{e.output}" for i, e in enumerate(ended))

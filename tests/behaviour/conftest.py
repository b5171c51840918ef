"""What the tests of calls share."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import zrpc
from tests.support.gates import Gate
from tests.support.observed import answers_heartbeats
from tests.support.programs import Ended, Programs
from tests.support.targets import echo
from tests.support.waiting import until
from tests.support.watched import Watched
from zrpc.agent.current import set_default_agent
from zrpc.testing import Mesh, local_mesh
from zrpc.testing.server import warm_server


@pytest.fixture(scope="module")
def _module_mesh() -> Iterator[Mesh]:
    with local_mesh(2, timeout=60, options={"rpc_timeout": 20}) as mesh:
        _introduce(mesh)
        yield mesh


def _introduce(mesh: Mesh) -> None:
    """Has the two workers open all their connections, heartbeats too.

    Later, they would seem to be left behind by some test with a mesh of its own.
    """
    for rank in range(2):
        with mesh.agent(rank).as_current():
            for to in range(2):
                zrpc.rpc_sync(to, max, (1, 2))
            until(partial(answers_heartbeats, 1 - rank), "a heartbeat is answered")


@pytest.fixture
def shared(_module_mesh: Mesh) -> Iterator[Mesh]:
    """As `caller`, with two workers that all tests of a module share: for what leaves no trace."""
    with _module_mesh.agent(0).as_current():
        yield _module_mesh


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


@pytest.fixture
def alone(free_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The variables for a world of one; whatever a test has started is ended."""
    monkeypatch.delenv("ZRPC_WORKER_NAME", raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port))
    yield free_port
    if zrpc.is_initialized():
        zrpc.shutdown(graceful=False)
    set_default_agent(None)  # as in a process that never had one


@pytest.fixture
def goes_on(shared: Mesh) -> Iterator[None]:
    """Whatever a test does, the worker goes on afterwards."""
    yield
    assert zrpc.rpc_sync(1, echo, ("still there",), timeout=10) == "still there"


@pytest.fixture
def watched() -> Iterator[Watched]:
    with Watched() as watched:
        yield watched


@pytest.fixture
def gate() -> Iterator[Gate]:
    with Gate() as gate:
        yield gate


@pytest.fixture
def no_collections() -> Iterator[None]:
    """What refers to itself is not freed."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()

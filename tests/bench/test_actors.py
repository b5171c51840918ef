"""Tests of the comparison with libraries of actors."""

from __future__ import annotations

import importlib
import importlib.util
import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
from click.testing import CliRunner

from tests.bench.test_run import is_running
from zrpc.bench.actors import ActorLibrary, Peer, _Rpc
from zrpc.bench.library import ACTOR_LIBRARIES
from zrpc.bench.mesh import Mesh
from zrpc.bench.rows import GROUPS, all_rows, select
from zrpc.bench.session import Sampling, Session
from zrpc.cli import main
from zrpc.launch import Starter
from zrpc.testing.procfs import children

ACTOR_ROWS = [(group, row) for group in GROUPS for row in group.rows if row.measured_by("ray")]
SHOWN_ROWS = ("empty call", "one way, 64 KiB", "RRef method", "each of 1,000 actor calls in flight")
RAYS_ROWS = (
    "compiled graph, echo of 1 MiB",
    "queue, items put and taken per second",
    "stream of 100 items of 1 MiB",
    "128 MiB to 7 workers by a group",
    "128 MiB of weights to 7 subscribers",
)


class _Threads:
    """Peers that are objects of this process, each with a thread that runs their methods."""

    def __init__(self, workers: int) -> None:
        names = [f"worker{rank}" for rank in range(1, workers)]
        self._peers = {name: (Peer(), ThreadPoolExecutor(1)) for name in names}

    def begin(self, peer: str, method: str, args: Sequence[Any]) -> Callable[[], Any]:
        actor, thread = self._peers[peer]
        return thread.submit(getattr(actor, method), *args).result

    def call_all(self, peers: Sequence[str], method: str, args: Sequence[Any]) -> list[Any]:
        return [wait() for wait in [self.begin(peer, method, args) for peer in peers]]

    def stream(self, peer: str, method: str, args: Sequence[Any]) -> Iterator[Any]:
        return iter(self.begin(peer, method, args)())

    def queue(self) -> queue.Queue[Any]:
        return queue.Queue()

    def compiled(self, peer: str, method: str, size: int) -> Any:
        return nullcontext(lambda value: self.begin(peer, method, (value,))())

    def stop(self) -> None:
        for _, thread in self._peers.values():
            thread.shutdown()


@pytest.mark.system
def test_actors_can_do_what_the_workloads_call(tiny: Sampling) -> None:
    for group, row in ACTOR_ROWS:
        actors = _Threads(group.workers)
        library = ActorLibrary("threads", _Rpc(actors), None, actors)
        module, _, name = row.workload.partition(":")
        workload = getattr(importlib.import_module(f"zrpc.bench.{module}"), name)
        session = Session("threads", tiny, group.workers, library=library)
        try:
            assert workload(session, *row.arguments).value > 0
        finally:
            library.leave()


@pytest.mark.system
@pytest.mark.parametrize("name", ACTOR_LIBRARIES)
def test_a_mesh_of_actors_leaves_nothing_behind(
    name: str, starter: Starter, tiny: Sampling
) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"needs {name}: pip install '{ACTOR_LIBRARIES[name]}'")
    with Mesh(starter, name, 3) as mesh:
        pids, directory = children(starter.pid), mesh.directory
        assert len(pids) == 1
        rows = {row.name: row for row in all_rows()}
        shown = map(rows.__getitem__, (*SHOWN_ROWS, *RAYS_ROWS))
        for row in [each for each in shown if each.measured_by(name)]:
            assert mesh.measure(row.workload, row.arguments, tiny, 60).value > 0
    assert mesh.shutdown_errors == []
    assert not directory.exists()
    assert not any(map(is_running, pids))


def test_the_default_rows_are_those_that_actors_have_and_others_are_measured_without_them() -> None:
    names = [row.name for group in select(against="ray") for row in group.rows]
    assert names == [row.name for _, row in ACTOR_ROWS]
    names = [row.name for group in select(against="monarch") for row in group.rows]
    assert "empty call" in names
    assert {*names}.isdisjoint(RAYS_ROWS)
    (group,) = select(["nested"], "monarch")
    assert [group.rows[0].measured_by(name) for name in ("zrpc", "monarch")] == [True, False]


@pytest.mark.parametrize("name", ACTOR_LIBRARIES)
def test_a_library_has_no_choice_of_tcp_and_must_be_installed(name: str) -> None:
    result = CliRunner().invoke(main, ["bench", "--against", name, "--tcp"])
    assert result.exit_code == 2
    if importlib.util.find_spec(name) is None:
        needed = f"--against {name} needs {name}: pip install '{ACTOR_LIBRARIES[name]}'"
        assert needed in result.output
    else:
        assert f"--tcp compares with torch: {name} has no such option" in result.output

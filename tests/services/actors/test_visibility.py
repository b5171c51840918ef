"""What ``zrpc stacks``, ``zrpc top``, numbers, warnings and traces show of actors."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import zrpc
from tests.support.gates import Gate
from tests.support.observed import ask_often
from tests.support.waiting import until
from zrpc.agent.stats import take_stats
from zrpc.services.inspection.collect import take_snapshot
from zrpc.services.inspection.discovery import MeshView
from zrpc.services.inspection.rates import mesh_rates
from zrpc.services.inspection.report import Report
from zrpc.services.inspection.snapshot import Snapshot
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=2, options={"rpc_timeout": 20})


@zrpc.actor
class Replay:
    def sample(self, gate: Gate) -> None:
        gate.wait_inside()

    def add(self, item: Any) -> Any:
        return item


@pytest.fixture
def busy(caller: Mesh) -> Iterator[Any]:
    """An actor that runs a call while three others wait."""
    with Gate() as gate:
        replay = zrpc.remote(1, Replay)
        futures = [replay.rpc_async().sample(gate)]
        gate.await_entry()
        futures += [replay.rpc_async().add(n) for n in range(3)]
        until(lambda: take_stats(caller.agent(1)).actors["Replay"].waiting == 3)
        yield replay
        gate.open()
        zrpc.wait_all(futures)


def test_stacks_and_numbers_show_what_runs_and_what_waits(caller: Mesh, busy: Any) -> None:
    snapshots = [take_snapshot(caller.agent(rank), 1000) for rank in range(2)]
    view = MeshView({s.member: Snapshot.parse(s.dump()) for s in snapshots})
    text = "\n".join(Report(view).worker(view.snapshots[snapshots[1].member]))
    assert "  actor Replay: runs Replay.sample for a worker (rank 0); 3 calls wait" in text
    assert (
        "s for its turn on the actor Replay, at place 2, behind a call of worker0 that runs "
        "`Replay.sample`"
    ) in text
    assert "→ Replay.add at" in "\n".join(Report(view).worker(view.snapshots[snapshots[0].member]))
    actors = take_stats(caller.agent(1)).actors["Replay"]
    assert (actors.number, actors.running, actors.waiting) == (1, 1, 3)
    assert actors.calls == ["Replay.sample"]
    assert take_stats(caller.agent(0)).actors == {}


def test_top_shows_a_table_of_actors_that_reads_well_at_80_columns(caller: Mesh, busy: Any) -> None:
    from rich.console import Console

    from zrpc.cli.top_tables import worker_screen

    snapshot = take_snapshot(caller.agent(1), 0)
    view = MeshView({snapshot.member: Snapshot.parse(snapshot.dump())})
    out = io.StringIO()
    console = Console(file=out, width=80)
    console.print(worker_screen(mesh_rates([], view)[0], 10, console))
    text = out.getvalue()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert "bytes in/s" in text
    assert "Busiest actors" in text
    [row] = [line for line in text.splitlines() if "Replay.sample" in line]
    assert row.split("│")[1].strip() == "Replay" if "│" in row else row.split()[0] == "Replay"


def test_a_time_out_says_behind_what_the_call_waits(caller: Mesh, busy: Any) -> None:
    ask_often(caller)
    with pytest.raises(zrpc.RpcTimeoutError) as caught:
        busy.rpc_sync(timeout=1).add(1)
    text = str(caught.value)
    assert "Replay.add on worker1 (rank 1)" in text
    assert "for its turn on the actor Replay, at place" in text
    assert "behind a call of worker0 that runs `Replay.sample`" in text


@pytest.mark.zrpc(workers=2, options={"rpc_timeout": 20, "warn_after": 0.2})
def test_the_warning_about_long_waits_names_the_waiting_method(
    caller: Mesh, busy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    until(lambda: any("Replay.add at worker1" in record.message for record in caplog.records))


def test_calls_are_counted_and_traced_by_class_and_method(caller: Mesh, tmp_path: Path) -> None:
    replay, file = zrpc.remote(1, Replay), tmp_path / "trace.json"
    zrpc.remote(1, Replay, name="named").ready()
    with zrpc.trace(file):
        for n in range(3):
            replay.rpc_sync().add(n)
    assert "Replay.add" in file.read_text()
    assert sorted(take_stats(caller.agent(1)).actors) == ["Replay", "Replay 'named'"]
    assert take_stats(caller.agent(0)).calls["Replay.add"].number == 3
    assert take_stats(caller.agent(1)).handlers["Replay.add"].number == 3

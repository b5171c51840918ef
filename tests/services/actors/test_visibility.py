"""What people see of actors: errors, ``zrpc stacks``, ``zrpc top``, numbers, warnings, traces."""

from __future__ import annotations

import gc
import io
import time
from collections.abc import Callable, Iterator
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
from zrpc.testing import Mesh, faults

pytestmark = pytest.mark.zrpc(workers=2, options={"rpc_timeout": 20})


@zrpc.actor
class Counter:
    def __init__(self, fail: bool = False, gate: Gate | None = None) -> None:
        self.count = 0
        if gate is not None:
            gate.wait_inside()
        if fail:
            raise KeyError("broken")

    def add(self, number: int) -> int:
        self.count += number
        return self.count

    def wait(self, gate: Gate) -> None:
        gate.wait_inside()

    def items(self, gate: Gate) -> Any:
        yield gate.wait_inside()


@pytest.fixture
def counter(caller: Mesh) -> Any:
    return zrpc.remote(1, Counter, name="steps")


def error_of(call: Callable[..., Any], *args: Any) -> Any:
    with pytest.raises((zrpc.RpcError, KeyError)) as caught:
        call(*args)
    return caught.value


def test_time_outs_and_cancelled_calls(counter: Any) -> None:
    with Gate() as gate:
        running = counter.rpc_async().wait(gate)
        gate.await_entry()
        counter.ready()  # it doesn't wait for calls
        uses = [
            ("add", lambda: counter.rpc_sync(timeout=0.1).add(1)),
            ("add", lambda: counter.rpc_async(timeout=0.1).add(1).wait()),
            ("to_here", lambda: counter.to_here(0.1)),
            ("stop()", lambda: counter.stop(0.1)),
        ]
        for name, use in uses:
            assert f"Counter.{name} of 'steps' on worker1 (rank 1)" in str(error_of(use))
        waiting = counter.rpc_async().add(1)
        waiting.cancel()
        text = "the call of Counter.add of 'steps' on worker1 (rank 1) was cancelled"
        assert text in str(error_of(waiting.wait))
        gate.open()
        running.wait()


def test_time_outs_of_constructors_and_streams(caller: Mesh) -> None:
    with Gate() as gate:
        made = zrpc.remote(1, Counter, (False, gate), name="steps")
        assert "Counter.ready() of 'steps' on worker1" in str(error_of(made.ready, 0.1))
        late = zrpc.remote(1, zrpc.actor(Counter), (False, gate), timeout=0.1, name="steps 2")
        text = "timed out, for the actor Counter 'steps 2': "
        error = until(
            lambda: next((e for e in [error_of(late.ready, 0.1)] if text in str(e)), None)
        )
        assert "Counter on worker1 (rank 1)" in str(error)
        gate.open()
        made.ready()
    with Gate() as gate:
        stream = made.rpc_stream(timeout=0.1).items(gate)
        text = "the stream Counter.items of 'steps' has come from worker1"
        assert text in str(error_of(next, stream))
        gate.open()


def test_a_constructor_that_fails(caller: Mesh) -> None:
    made = zrpc.remote(1, Counter, (True,), name="steps")
    for call in (made.ready, made.to_here, lambda: made.rpc_sync().add(1)):
        error = error_of(call)
        assert isinstance(error, KeyError)
        assert error.__notes__ == ["It was to make the actor Counter 'steps' on worker1."]
        assert "KeyError: 'broken'\nIt was to make the actor" in str(error.__cause__)


def test_the_death_of_the_worker(caller: Mesh, counter: Any) -> None:
    with Gate() as gate:
        uses: list[Any] = [counter.rpc_async().wait(gate).wait]
        gate.await_entry()
        late = zrpc.remote(1, Counter, (False, gate), name="late")
        gate.await_entry()
        caller.agent(1).close()
        for use in (*uses, counter.ready, counter.stop, lambda: counter.remote().add(1)):
            error = error_of(use)
            assert isinstance(error, zrpc.OwnerDied)
            assert "the actor Counter 'steps' on worker1 is lost: worker" in str(error)
        assert error.executed is False
        assert "make it again" in str(error)
        assert "the actor Counter 'late' on worker1 is lost" in str(error_of(late.ready))


@zrpc.actor(restart=True)
class Restarts(Counter):
    pass


@pytest.mark.system
@pytest.mark.zrpc(workers=3, faults=True)
def test_a_stop_whose_maker_does_not_answer_stops_the_actors_and_fails_in_time(mesh: Mesh) -> None:
    made = mesh.run(0, lambda: [zrpc.remote("worker1", Restarts, name=str(n)) for n in range(9)])

    def found() -> Any:
        return zrpc.group([zrpc.get_actor(str(n)) for n in range(9)])

    actors = mesh.run(2, found)
    with faults.cut(mesh, 0, 2):
        begun = time.monotonic()
        with pytest.raises(zrpc.GroupError) as caught:
            mesh.run(2, actors.stop, 0.5)
        assert time.monotonic() - begun < 9 * 0.5
        for place, error in caught.value.errors.items():
            assert f"Restarts.stop() of '{place}' on worker0 (rank 0)" in str(error)
        assert len(caught.value.errors) == 9
        for actor in actors:
            with pytest.raises(zrpc.RpcError, match="was stopped by worker2"):
                mesh.run(2, actor.rpc_sync().add, 1)
    assert made


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
        "s for its turn on the actor Replay, at place 1, behind a call of worker0 that runs "
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


def test_actors_that_have_ended_are_not_counted(caller: Mesh) -> None:
    gc.disable()
    try:
        for _ in range(3):
            replay = zrpc.remote(1, Replay)
            replay.rpc_sync().add(1)
            replay.stop()
            del replay
        until(lambda: take_stats(caller.agent(1)).actors == {})
    finally:
        gc.enable()

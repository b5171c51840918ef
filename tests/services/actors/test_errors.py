"""Errors that callers of an actor see: they name its class, its name and its worker."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

import zrpc
from tests.support.gates import Gate
from tests.support.waiting import until
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

"""Groups of workers that join and leave, and of actors that are made and stopped."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import zrpc
from tests.services.elastic.conftest import Elastic
from tests.services.groups.conftest import outcomes
from tests.support.gates import Gate
from tests.support.waiting import SOON, pending, until
from zrpc.testing import Mesh

pytestmark = pytest.mark.zrpc(workers=3, options={"rpc_timeout": 40})


def name() -> str:
    return zrpc.get_worker_info().name


@pytest.mark.system
def test_a_group_waits_for_its_size(elastic: Elastic) -> None:
    first, _ = elastic.join_all(2)

    def wait() -> list[str]:
        with first.as_current():
            return [*zrpc.group("w*", size=3, timeout=SOON)]

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        assert pending(waiting, 0.1)
        elastic.join("w7")
        assert waiting.result(SOON) == ["w0", "w1", "w7"]


def test_a_wait_for_workers_ends_with_this_one(mesh: Mesh) -> None:
    waiting = mesh.submit(1, zrpc.group, "*", size=9, timeout=0)
    assert pending(waiting, 0.1)
    mesh.agent(1).close()
    with pytest.raises(zrpc.NotInitializedError):
        waiting.result(SOON)


@pytest.mark.system
def test_a_dead_member_fails_and_its_successor_is_called(elastic: Elastic) -> None:
    first, dead = elastic.join_all(2)
    with first.as_current():
        group = zrpc.group(["w0", "w1"])
        assert zrpc.rpc_sync(group, name) == ["w0", "w1"]
        elastic.crash(dead)
        assert outcomes(zrpc.rpc_sync, group, name) == ["w0", zrpc.WorkerDied]
        elastic.join("w1")
        assert zrpc.rpc_sync(group, name) == ["w0", "w1"]


@pytest.mark.system
def test_a_live_group_calls_who_is_there(elastic: Elastic) -> None:
    first, _ = elastic.join_all(2)
    with first.as_current():
        fixed, live = zrpc.group("w*"), zrpc.group("w*", live=True)
        late = elastic.join("w5")
        assert [*live] == ["w0", "w1", "w5"]
        assert repr(live) == "<group of workers: 'w*', live: w0, w1, w5>"
        assert zrpc.rpc_sync(live, name) == ["w0", "w1", "w5"]
        assert zrpc.rpc_sync(fixed, name) == ["w0", "w1"]
        assert [value.owner_name() for value in zrpc.remote(live, list)] == ["w0", "w1", "w5"]
        only = zrpc.group("w5", live=True)
        elastic.crash(late)
        until(lambda: len(live) == 2, "the loss is known")
        assert repr(live) == "<group of workers: 'w*', live: w0, w1>"
        assert zrpc.rpc_sync(live, name) == ["w0", "w1"]
        with pytest.raises(zrpc.RpcError, match="match 'w5', found none in the mesh now"):
            zrpc.rpc_sync(only, name)


@zrpc.actor
class Closing:
    def __init__(self, gate: Gate | None, closed: list[int] | None = None) -> None:
        if gate is not None:
            gate.wait_inside()
        self.closed = [] if closed is None else closed

    def stop(self, group: Any) -> str:
        group.stop()
        return "stopped"

    def close(self) -> None:
        self.closed.append(zrpc.get_worker_info().rank)
        if self.closed == [0]:
            raise LookupError("close")


def test_a_group_is_ready_once_all_its_values_are(caller: Mesh, gate: Gate) -> None:
    actors = zrpc.remote(zrpc.group("*"), Closing, args=(zrpc.each([None, gate, None]),))
    actors[::2].ready()
    with pytest.raises(TypeError, match="timeout must be a number of seconds"):
        actors.ready(timeout="5")  # type: ignore[arg-type]
    with pytest.raises(zrpc.GroupError) as missing:
        actors.ready(timeout=0.05)
    assert [*missing.value.errors] == [1]
    assert isinstance(missing.value.errors[1], zrpc.RpcTimeoutError)
    waiting = caller.submit(0, actors.ready)
    assert pending(waiting, 0.1)
    gate.open()
    waiting.result(SOON)


def test_all_actors_of_a_group_are_stopped_if_some_fail(caller: Mesh) -> None:
    made: list[Any] = [*zrpc.remote(zrpc.group("*"), Closing, args=(None,)), zrpc.remote(1, dict)]
    actors: Any = zrpc.group(made)
    with pytest.raises(zrpc.GroupError) as failed:
        actors.stop()
    assert [*map(type, failed.value.errors.values())] == [LookupError, zrpc.RpcError]
    assert [*failed.value.errors] == [0, 3]
    for actor in made[:3]:
        with pytest.raises(zrpc.RpcError, match="was stopped by worker0"):
            actor.rpc_sync().stop(())
    actors[1:3].stop()  # once more: it does nothing


def test_a_group_that_one_of_its_actors_stops_does_not_wait_for_that_one(caller: Mesh) -> None:
    actors: Any = zrpc.remote(zrpc.group("worker[12]"), Closing, args=(None,))
    assert actors[0].rpc_sync().stop(actors) == "stopped"
    with pytest.raises(zrpc.GroupError):
        actors.rpc_sync().stop(())

"""Groups of actors: whether they are made, and their end."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import zrpc
from tests.support.gates import Gate
from tests.support.waiting import SOON, pending
from zrpc.testing import Mesh

pytestmark = [
    pytest.mark.zrpc(workers=3, options={"rpc_timeout": 40}),
    pytest.mark.usefixtures("caller"),
]


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

    def wait() -> None:
        with caller.agent(0).as_current():
            actors.ready()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        assert pending(waiting, 0.1)
        gate.open()
        waiting.result(SOON)


def test_all_actors_of_a_group_are_stopped_if_some_fail(gate: Gate) -> None:
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


def test_a_group_that_one_of_its_actors_stops_does_not_wait_for_that_one() -> None:
    actors: Any = zrpc.remote(zrpc.group("worker[12]"), Closing, args=(None,))
    assert actors[0].rpc_sync().stop(actors) == "stopped"
    with pytest.raises(zrpc.GroupError):
        actors.rpc_sync().stop(())

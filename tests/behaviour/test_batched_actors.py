"""Batched methods of actors: calls leave the mailbox for their batch, which is one call there."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import zrpc as rpc
from tests.support.gates import Gate
from tests.support.observed import busy
from tests.support.waiting import SOON, until
from zrpc.testing import Mesh

# Longer than any test: such a batch begins when it is full.
FULL = SOON * 10


@rpc.actor
class Server:
    """Notes when two of its calls run at the same time."""

    def __init__(self) -> None:
        self.running = threading.Lock()

    def _alone(self, result: Any) -> Any:
        assert self.running.acquire(blocking=False), "two calls run at the same time"
        self.running.release()
        return result

    def wait(self, gate: Gate) -> None:
        with self.running:
            gate.work_inside()

    @rpc.batched(max_size=8, max_wait=0)
    def act(self, values: list[Any]) -> list[Any]:
        return [self._alone((value, len(values))) for value in values]

    @rpc.batched(max_size=2, max_wait=FULL)
    def pair(self, values: list[Any]) -> list[Any]:
        if values[0] == "bad":
            raise KeyError(values)
        return self._alone(values)

    @rpc.batched(max_size=2, max_wait=FULL)
    async def pair_async(self, gates: list[Gate]) -> list[Any]:
        with self.running:
            gates[0].entered.release()
            while not gates[0].opened.is_set():
                await asyncio.sleep(0.001)
        return [len(gates)] * len(gates)

    def plain(self) -> Any:
        return self._alone("plain")


@pytest.fixture
def server(shared: Mesh) -> Any:
    return rpc.remote(1, Server)


def test_calls_that_waited_for_the_actor_become_one_batch(
    shared: Mesh, server: Any, gate: Gate
) -> None:
    first = server.rpc_async().wait(gate)
    gate.await_entry()
    futures = [server.rpc_async().act(number) for number in range(12)]
    until(lambda: busy(shared) == 13)
    gate.open()
    first.wait()
    found = [future.wait() for future in futures]
    # In the order of this worker's calls; what does not fit into the first is in the second.
    assert found == [(number, 8) for number in range(8)] + [(number, 4) for number in range(8, 12)]


def test_other_calls_run_while_a_batch_collects(shared: Mesh, server: Any) -> None:
    one = server.rpc_async().pair(1)
    assert server.rpc_sync().plain() == "plain"
    assert not one.done()
    assert server.rpc_sync().pair(2) == 2
    assert one.wait() == 1


def test_a_batch_of_a_coroutine_holds_the_actor_until_it_ends(
    shared: Mesh, server: Any, gate: Gate
) -> None:
    futures = [server.rpc_async().pair_async(gate) for _ in range(2)]
    gate.await_entry()
    others = [server.rpc_async().act(1), server.rpc_async().plain()]
    until(lambda: busy(shared) == 4)
    gate.open()
    assert [future.wait() for future in futures] == [2, 2]
    assert [other.wait() for other in others] == [(1, 1), "plain"]


def test_a_batch_that_fails_lets_the_actor_go_on(shared: Mesh, server: Any) -> None:
    for future in [server.rpc_async().pair("bad") for _ in range(2)]:
        with pytest.raises(KeyError):
            future.wait()
    made = [server.remote().pair(number) for number in range(2)]
    assert [each.to_here() for each in made] == [0, 1]
    assert server.rpc_sync().plain() == "plain"


def test_calls_that_are_cancelled_while_their_batch_waits(
    shared: Mesh, server: Any, gate: Gate
) -> None:
    futures = [server.rpc_async().pair(0)]
    until(lambda: busy(shared) == 1)
    first = server.rpc_async().wait(gate)
    gate.await_entry()
    futures.append(server.rpc_async().pair(1))
    until(lambda: busy(shared) == 3)
    for future in futures:
        assert future.cancel()
    until(lambda: busy(shared) == 1)
    gate.open()
    first.wait()
    assert server.rpc_sync().plain() == "plain"
    assert [f.wait() for f in [server.rpc_async().pair(n) for n in range(2)]] == [0, 1]


def test_a_stopped_actor_refuses_the_calls_that_wait_for_a_batch(shared: Mesh, server: Any) -> None:
    waiting = server.rpc_async().pair(1)
    until(lambda: busy(shared) == 1)
    assert server.rpc_sync().plain() == "plain"
    server.stop()
    for late in (waiting, server.rpc_async().pair(2)):
        with pytest.raises(rpc.RpcError, match="the actor Server on worker1 was stopped") as info:
            late.wait()
        assert info.value.executed is False


class Several:
    name = "here"

    @rpc.batched(max_size=4, max_wait=FULL)
    def act(self, numbers: list[int]) -> list[Any]:
        return [(number, self.name) for number in numbers]


def test_an_actor_that_runs_several_calls_at_once(shared: Mesh) -> None:
    server = rpc.remote(1, rpc.actor(Several, concurrency=4))
    futures = [server.rpc_async().act(number) for number in range(8)]
    assert [future.wait() for future in futures] == [(number, "here") for number in range(8)]

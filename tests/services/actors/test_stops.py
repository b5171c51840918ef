"""How actors are made ready, and how they stop."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import zrpc
from tests.services.actors.test_actors import Log, Slow, refused
from tests.services.actors.test_circles import CIRCLE
from tests.support.gates import Gate
from tests.support.waiting import SOON, until
from zrpc.testing import Mesh

pytestmark = [
    pytest.mark.zrpc(workers=2, options={"rpc_timeout": 20}),
    pytest.mark.usefixtures("caller"),
]


class Closing(Log):
    def __init__(self, closed: list[Any]) -> None:
        super().__init__()
        self.closed = closed

    def close(self) -> None:
        assert self.running == 0
        self.closed.append(self.calls)


def broken() -> None:
    raise KeyError("broken")


def test_ready_and_stop_raise_what_the_constructor_has_raised() -> None:
    for to in (0, 1):
        made = zrpc.remote(to, broken)
        for use in (made.ready, made.stop):
            with pytest.raises(KeyError, match="broken"):
                use()
    zrpc.RRef(1).ready()
    with pytest.raises(zrpc.RpcError, match="is none: it is a dict"):
        zrpc.remote(1, dict).stop()


@pytest.mark.parametrize("to", [0, 1])
def test_stop_fails_what_waits_and_closes_after_the_rest(caller: Mesh, gate: Gate, to: int) -> None:
    log = zrpc.remote(to, Closing, args=([],))
    running, waiting = log.rpc_async().wait(gate), log.rpc_async().note(1)
    gate.await_entry()
    kept = log.local_value() if to == 0 else None
    stops = [caller.submit(0, log.stop) for _ in range(2)]
    what = rf"the actor Closing on worker{to} was stopped by worker0"
    refused(what, waiting.wait)
    gate.open()
    assert running.wait() == "wait"
    for stop in stops:
        stop.result(SOON)
    log.stop()
    for use in (lambda: log.rpc_sync().note(2), log.rpc_async().note(2).wait, log.to_here):
        refused(what, use)
    if kept is not None:
        assert kept.closed == [["wait"]]


def test_stop_fails_what_waits_for_the_constructor(caller: Mesh, gate: Gate) -> None:
    log = zrpc.remote(1, Slow, args=(gate,), name="slow")
    gate.await_entry()
    waiting = [log.rpc_async().note(1), log.rpc_async().note(2)]
    stop = caller.submit(0, log.stop)
    until(lambda: len(caller.agent(1).callee.requests) == 4)  # the constructor's, and these
    gate.open()
    for future in waiting:
        refused("was stopped by worker0", future.wait)
    stop.result(SOON)
    zrpc.remote(0, Closing, args=([],), name="slow").stop()


def test_stop_raises_what_close_has_raised_and_the_actor_is_gone() -> None:
    class Bad(Log):
        async def close(self) -> None:
            await asyncio.sleep(0)
            raise KeyError("close")

    log = zrpc.remote(1, Bad)
    with pytest.raises(KeyError, match="close"):
        log.stop()
    with pytest.raises(zrpc.RpcError, match="was stopped"):
        log.rpc_sync().note(1)


class Retiring(Closing):
    def retire(self, gate: Gate) -> str:
        zrpc.get_actor("retiring").stop()
        gate.wait_inside()
        return "retired"

    async def retire_soon(self, me: zrpc.RRef[Any]) -> str:
        await asyncio.sleep(0)
        me.stop()
        me.stop()
        return "retired"


@pytest.mark.parametrize(("to", "concurrency"), [(0, 1), (1, 1), (1, 2)])
def test_an_actor_that_stops_itself_ends_after_it(gate: Gate, to: int, concurrency: int) -> None:
    kind = zrpc.actor(Retiring, concurrency=concurrency)
    actor = zrpc.remote(to, kind, args=([],), name="retiring")
    calls = [actor.rpc_async().retire(gate)]
    gate.await_entry()
    with pytest.raises(
        zrpc.RpcError, match=f"Retiring 'retiring' on worker{to} was stopped by worker{to}"
    ):
        actor.rpc_sync().note(1)
    gate.open()
    assert calls[0].wait() == "retired"
    actor.stop()  # waits for the first one
    with pytest.raises(zrpc.RpcTimeoutError):
        zrpc.get_actor("retiring", timeout=0.01)
    another = zrpc.remote(to, kind, args=([],))
    assert another.rpc_sync().retire_soon(another) == "retired"
    with pytest.raises(zrpc.RpcError, match="was stopped"):
        another.rpc_sync().note(1)


def stop(node: Any) -> None:
    node.stop()


@zrpc.actor
class Quitter:
    closed = 0  # of this process, so of all workers

    def stop_through(self, to: int, me: Any) -> str:
        try:
            zrpc.rpc_sync(to, stop, args=(me,))
        except zrpc.RpcError as error:
            return str(error)
        return ""

    def close(self) -> None:
        Quitter.closed += 1


@pytest.mark.zrpc(workers=3, options={"rpc_timeout": 0})
def test_an_actor_that_stops_itself_through_another_worker_gets_an_error_and_ends() -> None:
    quitter = zrpc.remote(1, Quitter)
    assert CIRCLE in quitter.rpc_sync().stop_through(2, quitter)
    quitter.stop()  # waits for the first stop
    assert Quitter.closed == 1
    with pytest.raises(zrpc.RpcError, match="was stopped by worker2"):
        quitter.rpc_sync().stop_through(2, quitter)

"""Where calls stand at their callee, as time-outs, losses and warnings say."""

from __future__ import annotations

import re
from typing import Any

import pytest

import zrpc
from tests.services.inspection.doors import knock
from tests.support.gates import Gate
from tests.support.observed import ask_often
from tests.support.waiting import until
from zrpc.services.inspection.service import InspectionService
from zrpc.testing import Mesh
from zrpc.wire.member_id import MemberId

pytestmark = pytest.mark.system


@pytest.fixture(autouse=True)
def busy(mesh: Mesh, seems_to_work: None) -> None:
    """Handlers that wait count as busy, and all are asked soon."""
    ask_often(mesh)


def explained(mesh: Mesh, text: str, rank: int = 1) -> str:
    """What worker0 knows of a worker, once that has this text."""
    service = mesh.agent(0).service(InspectionService)
    return until(lambda: text in (found := service.explain(rank)) and found, text)


def wait_until_nothing_is_said(mesh: Mesh) -> None:
    service = mesh.agent(0).service(InspectionService)
    until(lambda: not service.explain(1), "worker1 is idle")


def wait_until_a_call_is(mesh: Mesh, standing: str) -> None:
    [call] = mesh.agent(0).caller.calls.in_flight()
    rules = mesh.agent(0).service(InspectionService).rules
    until(lambda: re.match(standing, rules.standing(MemberId(1), call.call_id)), standing)


BUSY = r"the only thread of its pool has been busy for \d+ s and (a request waits|2 requests wait)"


@pytest.mark.zrpc(workers=3, options={"num_worker_threads": 1})
def test_a_time_out_says_behind_what_a_call_is_queued(mesh: Mesh, door: Gate) -> None:
    first = mesh.submit(2, zrpc.rpc_sync, "worker1", knock)
    door.await_entry()
    with mesh.agent(0).as_current(), pytest.raises(zrpc.RpcTimeoutError) as caught:
        zrpc.rpc_sync("worker1", max, args=(1, 2), timeout=1.0)
    door.opened.set()
    assert first.result() == "in"
    error = str(caught.value)
    assert "error: max on worker1 (rank 1); worker1 (rank 1) is alive: the only thread" in error
    standing = r"queued for \d\.\d s behind a call of worker2 that runs `knock`, at place 1 of 1\."
    caught.match(rf"{BUSY}; this call is {standing}")


@pytest.mark.zrpc(options={"num_worker_threads": 1})
def test_a_time_out_says_that_the_pool_is_busy(caller: Mesh, door: Gate) -> None:
    """Also that of a call which is too young to be asked about, and of one to the worker itself."""
    futures = [zrpc.rpc_async(f"worker{rank}", knock) for rank in (0, 0, 1, 1)]
    for rank, state in enumerate(("is this worker", "is alive")):
        explained(caller, "busy", rank)
        with pytest.raises(zrpc.RpcTimeoutError, match=rf"worker{rank} .* {state}: {BUSY}"):
            zrpc.rpc_sync(f"worker{rank}", max, args=(1, 2), timeout=0.01)
    door.opened.set()
    assert [future.wait() for future in futures] == ["in"] * 4
    wait_until_nothing_is_said(caller)


@pytest.mark.zrpc(options={"num_worker_threads": 1})
def test_the_description_of_a_loss_says_that_the_pool_was_busy(caller: Mesh, door: Gate) -> None:
    futures = [zrpc.rpc_async("worker1", knock) for _ in range(2)]
    assert "is alive" in explained(caller, "busy")
    leaves = caller.submit(1, zrpc.shutdown, graceful=False)
    for future in futures:
        with pytest.raises(zrpc.WorkerDied, match=f"; shortly before, {BUSY}"):
            future.wait()
    door.opened.set()
    leaves.result()


async def holds_up() -> str:
    return knock()


async def begins() -> int:
    return 1


def test_a_time_out_says_that_the_event_loop_is_held_up(caller: Mesh, door: Gate) -> None:
    first = zrpc.rpc_async("worker1", holds_up)
    door.await_entry()
    second = zrpc.rpc_async("worker1", begins)
    explained(caller, "held up")
    with pytest.raises(
        zrpc.RpcTimeoutError,
        match=r"alive: its event loop has been held up .* 2 coroutines wait to begin; this call is "
        r"waiting for 0\.\d s for the event loop to begin it",
    ):
        zrpc.rpc_sync("worker1", begins, timeout=0.5)
    assert zrpc.rpc_sync("worker1", max, args=(1, 2)) == 2
    door.opened.set()
    assert first.wait() == "in"
    assert second.wait() == 1
    wait_until_nothing_is_said(caller)


def test_a_time_out_says_that_a_value_is_waited_for(caller: Mesh, door: Gate) -> None:
    rref = zrpc.remote("worker1", knock)
    waits = rref.to_here, rref.rpc_sync(timeout=0.5).upper
    for wait, options in zip(waits, ({"timeout": 0.5}, {}), strict=True):
        with pytest.raises(
            zrpc.RpcTimeoutError, match=r"waiting for \d\.\d s for the value of an "
        ):
            wait(**options)
    door.opened.set()
    assert rref.to_here() == "in"


def test_callbacks_hold_up_neither_questions_nor_answers(caller: Mesh, door: Gate) -> None:
    for rank in range(2):
        with caller.agent(rank).as_current():
            zrpc.rpc_async(rank, max, args=(1, 2)).then(lambda _: knock())
    door.await_entry()
    door.await_entry()
    future = zrpc.rpc_async("worker1", knock)
    wait_until_a_call_is(caller, "running `knock`")
    door.opened.set()
    assert future.wait() == "in"


class SlowError(Exception):
    def __reduce__(self) -> Any:
        knock()
        return SlowError, ()


def fail_slowly() -> None:
    raise SlowError


def test_a_callee_says_that_it_answers(caller: Mesh, door: Gate) -> None:
    future = zrpc.rpc_async("worker1", fail_slowly)
    door.await_entry()
    wait_until_a_call_is(caller, "being answered")
    door.opened.set()
    with pytest.raises(SlowError):
        future.wait()

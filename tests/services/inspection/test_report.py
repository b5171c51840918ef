"""What is seen of threads and coroutines, and said of a mesh: circles of waiting, and workers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

import zrpc
from tests.services.inspection.doors import knock, knock_and_await, knock_and_return, knock_at
from tests.support import waiting_circle
from tests.support.gates import Gate
from tests.support.identity import event
from tests.support.waiting import SOON, until
from zrpc.services.inspection.collect import take_snapshot
from zrpc.services.inspection.discovery import MeshView, ask, meshes
from zrpc.services.inspection.report import Report
from zrpc.services.inspection.snapshot import Activity
from zrpc.services.inspection.stacks import activities
from zrpc.testing import Mesh

lock = threading.Lock()
kept: list[zrpc.RRef[int]] = []


def look(mesh: Mesh) -> MeshView:
    cards = mesh.agent(0).membership.records.values()
    [view], rest = meshes(ask([Path(card.directory) for card in cards], SOON))
    assert rest == []
    return view


def awaited(mesh: Mesh, find: Callable[[Report], list[list[str]]]) -> list[str]:
    """What the first report says in which there is one, waited for."""
    found = until(lambda: find(Report(look(mesh))), "one is found")
    assert len(found) == 1, found
    return found[0]


def ends(mesh: Mesh, waits: Future[int]) -> None:
    """Ends what would wait for ever."""
    for rank in range(len(mesh)):
        mesh.agent(rank).caller.calls.fail(lambda _: zrpc.RpcError("enough"))
    with pytest.raises(zrpc.RpcError, match="enough"):
        waits.result(SOON)


def test_a_coroutine_that_waits_without_await(mesh: Mesh) -> None:
    waits = mesh.submit(0, zrpc.rpc_sync, "worker0", waiting_circle.holds_up_its_loop)
    lines = awaited(mesh, Report.cycles)
    assert lines[0] == "A circle of waiting over 2 workers: none of these can go on."
    assert lines[1].startswith(
        "1. worker0 (rank 0): zrpc-worker0-asyncio, which runs holds_up_its_loop for worker0 "
        "(rank 0), waits for calls_a_coroutine at worker1 (rank 1), for "
    )
    assert f", at {waiting_circle.__file__}:" in lines[1]
    assert "which runs calls_a_coroutine for worker0 (rank 0), waits for coroutine at" in lines[2]
    assert lines[3].startswith("3. worker0 (rank 0): a coroutine, which runs coroutine for worker1")
    assert "needs the thread of its event loop" in lines[3]
    assert len(lines) == 5
    ends(mesh, waits)


def waits_unseen() -> int:
    """Waits in a way that the pool does not see."""
    [value] = torch.futures.wait_all([zrpc.rpc_async("worker0", comes_back)])
    return int(value)


def comes_back() -> int:
    return zrpc.rpc_sync("worker1", max, args=(1, 2))


@pytest.mark.zrpc(options={"num_worker_threads": 1})
@pytest.mark.usefixtures("seems_to_work")
def test_a_pool_whose_only_thread_waits(mesh: Mesh) -> None:
    waits = mesh.submit(0, zrpc.rpc_sync, "worker1", waits_unseen)
    lines = awaited(mesh, Report.cycles)
    assert "runs comes_back for worker1 (rank 1), waits for max at worker1 (rank 1)" in lines[1]
    assert lines[2] == (
        "2. worker1 (rank 1): what is queued can't begin: the only thread of its pool "
        "(num_worker_threads is 1) waits like this."
    )
    assert "runs waits_unseen for worker0 (rank 0), waits for comes_back at worker0" in lines[3]
    ends(mesh, waits)


def makes_what_it_needs() -> int:
    assert event("kept").wait(SOON)
    return zrpc.rpc_sync("worker0", fetches)


def fetches() -> int:
    return kept[0].to_here()


def test_a_value_that_needs_itself(mesh: Mesh) -> None:
    def begin() -> int:
        kept.append(zrpc.remote("worker1", makes_what_it_needs))
        event("kept").set()
        return kept[0].to_here()

    waits = mesh.submit(0, begin)
    lines = awaited(mesh, Report.cycles)
    needs = "needs the value of an RRef, which makes_what_it_needs for worker0 (rank 0)"
    assert any(needs in line for line in lines)
    ends(mesh, waits)
    kept.clear()


def calls_back() -> int:
    return zrpc.rpc_sync("worker0", needs_the_lock)


def needs_the_lock() -> int:
    assert lock.acquire(timeout=SOON)
    lock.release()
    return 1


@pytest.mark.system
def test_a_lock_that_an_earlier_one_holds_is_suspected(mesh: Mesh) -> None:
    waits = mesh.submit(0, lambda: zrpc.rpc_async("worker1", calls_back).wait())
    assert waits.result() == 1  # nothing holds it
    with lock:
        waits = mesh.submit(0, lambda: zrpc.rpc_async("worker1", calls_back).wait())
        lines = awaited(mesh, lambda report: report.suspects(look(mesh)))
    assert lines[0] == "A chain of waiting comes back to worker0 (rank 0):"
    assert "waits for calls_back at worker1 (rank 1)" in lines[1]
    assert "waits for needs_the_lock at worker0 (rank 0)" in lines[2]
    assert "which runs needs_the_lock for worker1 (rank 1), stands still, at" in lines[3]
    assert waits.result() == 1


def test_what_is_too_much_is_counted(caller: Mesh, door: Gate) -> None:
    futures = [zrpc.rpc_async("worker1", knock) for _ in range(5)]
    door.await_entry(5)
    taken = {rank: take_snapshot(caller.agent(rank), 2) for rank in range(2)}
    report = Report(MeshView(taken))
    assert "  and 3 more calls" in report.worker(taken[0])
    assert "  and 3 more requests" in report.worker(taken[1])
    door.opened.set()
    assert [future.wait() for future in futures] == ["in"] * 5


def test_a_handler_that_ends_while_its_worker_is_looked_at(caller: Mesh, door: Gate) -> None:
    future = zrpc.rpc_async("worker1", knock)
    door.await_entry()
    snapshot = take_snapshot(caller.agent(1), 10)
    snapshot.requests.clear()  # they are looked at after the threads
    lines = "\n".join(Report(MeshView({snapshot.member: snapshot})).worker(snapshot))
    door.opened.set()
    assert future.wait() == "in"
    assert "\n  Thread zrpc-worker1-" in lines
    assert ", which runs " not in lines


def test_a_worker_as_text(caller: Mesh, door: Gate) -> None:
    futures = [
        zrpc.rpc_async("worker1", knock_at, args=("worker0",), timeout=0),
        zrpc.rpc_async("worker1", knock_and_await, args=("worker0",)),
        zrpc.rpc_async("worker1", knock_and_return, args=("worker0",)),
    ]
    door.await_entry(3)
    until(lambda: any(each.task for each in look(caller).snapshots[1].activities))
    view = look(caller)
    report = Report(view)
    assert report.cycles() == []
    assert report.heading().startswith("Mesh of 2 workers (")
    caller = "\n".join(report.worker(view.snapshots[0]))
    callee = "\n".join(report.worker(view.snapshots[1]))
    assert "\n  → knock_at at worker1 (rank 1), for 0." in caller
    assert ", without a timeout" in caller
    assert "\n  ← knock for worker1 (rank 1), called 0." in caller
    assert " s ago, running `knock` for 0." in caller
    assert "\n  → knock at worker0 (rank 0), for 0." in callee
    assert " waits for it, at " in callee
    assert "which runs knock_at for worker0 (rank 0), most recent call last:\n" in callee
    assert "\n  A coroutine, which runs knock_and_await for worker0 (rank 0), most" in callee
    assert "    return zrpc.rpc_sync(worker, knock)\n" in callee
    assert " s for the future that its function has returned\n" in callee
    assert " s, and has waited for `knock` at worker0 for 0." in callee
    assert "nothing to do (--all shows them)" in callee
    everything = "\n".join(Report(view, idle=True).worker(view.snapshots[1]))
    assert "Thread zrpc-worker1-io-" in everything
    assert "zrpc/runtime/" in everything.split("Thread zrpc-worker1-io-")[1]
    assert json.loads(json.dumps(report.as_dict()))["workers"][0]["name"] == "worker0"
    door.opened.set()
    assert [future.wait() for future in futures] == ["in"] * 3


# -- threads and coroutines --------------------------------------------------------------------


# By these, code sees the local variables of other functions and their names.
def running(mesh: Mesh, rank: int) -> list[Activity]:
    return [each for each in activities(mesh.agent(rank)) if each.request is not None]


def awaits_later() -> object:
    """A coroutine, of a function that doesn't say that it makes one."""
    return knock_and_await("worker0")


@pytest.mark.parametrize("handler", [knock_and_await, awaits_later])
def test_a_coroutine_is_in_no_thread(mesh: Mesh, door: Gate, handler: object) -> None:
    args = ("worker0",) if handler is knock_and_await else ()
    with mesh.agent(0).as_current():
        future = zrpc.rpc_async("worker1", handler, args=args)  # type: ignore[arg-type]
        door.await_entry()
        until(lambda: any(each.calls for each in running(mesh, 1)))
        assert [(each.task, each.what) for each in running(mesh, 1)] == [
            (True, getattr(handler, "__name__", ""))
        ]
        door.opened.set()
        assert future.wait() == "in"


async def calls_and_sleeps() -> str:
    future = zrpc.rpc_async("worker0", knock)
    await asyncio.sleep(0.5)
    return str(await future)


@pytest.mark.system
def test_a_coroutine_waits_only_for_what_it_awaits(caller: Mesh, door: Gate) -> None:
    future = zrpc.rpc_async("worker1", calls_and_sleeps)
    door.await_entry()
    until(lambda: all(each.task for each in running(caller, 1)))  # it sleeps
    assert [(each.task, each.calls) for each in running(caller, 1)] == [(True, [])]
    until(lambda: [len(each.calls) for each in running(caller, 1)] == [1])
    door.opened.set()
    assert future.wait() == "in"


def test_a_thread_that_has_answered_handles_nothing(mesh: Mesh) -> None:
    for _ in range(10):
        assert mesh.run(0, zrpc.rpc_sync, "worker1", max, (1, 2)) == 2
    until(lambda: running(mesh, 1) == [])


def calls_twice(size: int) -> list[str]:
    futures = [zrpc.rpc_async("worker0", knock_with, args=(bytes(size),)) for _ in range(2)]
    return [future.wait() for future in futures]


def knock_with(_: bytes) -> str:
    return knock()


@pytest.mark.zrpc(options={"max_bytes_in_flight": 10_000, "shared_memory": 0})
def test_a_handler_waits_for_the_call_that_needs_room(caller: Mesh, door: Gate) -> None:
    future = zrpc.rpc_async("worker1", calls_twice, args=(9_000,))
    door.await_entry()
    calls = caller.agent(1).caller.calls
    until(lambda: len(calls) == 2)
    latest = max(call.call_id for call in calls.in_flight())
    assert [each.calls for each in running(caller, 1)] == [[latest]]
    door.opened.set()
    assert future.wait() == ["in", "in"]

"""A pool in which requests have to wait: the rules, and what callers are told."""

from __future__ import annotations

import itertools

import pytest

import zrpc
from tests.services.inspection.doors import knock
from tests.support.gates import Gate
from tests.support.waiting import until
from zrpc.errors import ProtocolError
from zrpc.services.inspection.congestion import Congestion, Place, Report, Reports
from zrpc.services.inspection.service import InspectionService
from zrpc.testing import Mesh


def report(congestion: Congestion, now: float, queued: int = 3) -> Report | None:
    return congestion.report(now, 16, 16, queued)


def test_a_queue_that_is_empty_now_and_then_is_none() -> None:
    rules = Congestion(Place.POOL)
    for tenth in range(100):
        now = tenth / 10
        assert not rules.observe_queue(now, queued=tenth % 5, begun=tenth)
        assert report(rules, now) is None


def test_callers_of_waiting_requests_are_notified_after_a_while_and_again() -> None:
    rules = Congestion(Place.POOL)
    looks = [rules.observe_queue(tenth / 10, 3, 0) for tenth in range(11)]
    assert looks == [False] * 10 + [True]
    said = rules.reports_for(1.0, {2, 5}, report(rules, 1.0))
    assert said == dict.fromkeys((2, 5), Report(Place.POOL, 1.0, 1.0, 16, 16, 3))
    assert not rules.observe_queue(1.9, 3, 0)
    assert rules.observe_queue(2.0, 3, 0)


def test_a_worker_that_no_longer_waits_is_notified_once() -> None:
    rules = Congestion(Place.POOL)
    rules.observe_queue(0, 3, 0)
    assert rules.observe_queue(1, 3, 0)
    rules.reports_for(1, {2, 5}, report(rules, 1))
    assert rules.observe_queue(2, 1, 2)
    nothing = Report(Place.POOL, 0, 0, 0, 0, 0)
    said = rules.reports_for(2, {5}, report(rules, 2, 1))
    assert said == {2: nothing, 5: Report(Place.POOL, 2.0, 0.0, 16, 16, 1)}
    assert rules.observe_queue(2.1, 0, 3)
    assert rules.full_for(2.1) is None
    assert rules.reports_for(2.1, set(), report(rules, 2.1, 0)) == {5: nothing}
    assert not rules.observe_queue(2.2, 0, 3)


def test_a_report_travels() -> None:
    told = Report(Place.POOL, 12.5, 3.25, 16, 17, 4)
    assert Report.parse(told.pack()) == told
    for wrong in (b"", b"\2" + told.pack()[1:], b"\0\0\0", told.pack() + b"\0"):
        with pytest.raises(ProtocolError):
            Report.parse(wrong)


def test_what_a_report_says() -> None:
    for told, text in (
        (
            Report(Place.POOL, 12, 0, 16, 16, 3),
            "all 16 threads of its pool have been busy for 12 s and 3 requests wait",
        ),
        (
            Report(Place.POOL, 12, 11, 1, 1, 1),
            "the only thread of its pool has been busy for 12 s and a request waits; "
            "none was begun for 11 s",
        ),
        (
            Report(Place.POOL, 2, 0, 16, 9, 2),
            "its pool has got no thread beyond its 9 for 2 s and 2 requests wait",
        ),
        (
            Report(Place.LOOP, 12, 0, 1, 1, 2),
            "its event loop has been held up for 12 s, by a coroutine that does not `await`, and "
            "2 coroutines wait to begin",
        ),
    ):
        assert told.text() == text


def test_what_was_said_holds_for_a_while() -> None:
    reports = Reports()
    reports.record(1, Report(Place.POOL, 12, 0, 16, 16, 3), 100.0)
    assert reports.describe(1, "worker1", 102, gone=False).startswith(
        "worker1 is alive: all 16 threads of its pool have been busy for 14 s"
    )
    assert reports.describe(1, "worker1", 110, gone=False).startswith(
        "10 s ago worker1 said that all"
    )
    assert reports.describe(1, "worker1", 101, gone=True).startswith(
        "shortly before, all 16 threads"
    )
    assert reports.describe(1, "worker1", 110, gone=True) == ""
    reports.record(1, Report(Place.POOL, 0, 0, 0, 0, 0), 103)
    assert (
        reports.describe(1, "worker1", 103, gone=False)
        == reports.describe(2, "", 0, gone=False)
        == ""
    )


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handlers that wait seem to work: nobody takes their place. And it is soon told."""
    used = itertools.count()
    monkeypatch.setattr(
        "zrpc.runtime.thread_pool.processor_time_of", lambda ident: float(next(used))
    )
    monkeypatch.setattr("zrpc.services.inspection.congestion.REPORT_AFTER_SECONDS", 0.2)


def explained(mesh: Mesh, rank: int = 1) -> str:
    """What worker0 knows of a worker, waited for."""
    service = mesh.agent(0).service(InspectionService)
    return until(lambda: service.explain(rank), "it says something")


def wait_until_nothing_is_said(mesh: Mesh) -> None:
    service = mesh.agent(0).service(InspectionService)
    until(lambda: not service.explain(1), "worker1 takes it back")


BUSY = r"the only thread of its pool has been busy for \d+ s and (a request waits|2 requests wait)"


@pytest.mark.system
@pytest.mark.usefixtures("busy")
@pytest.mark.zrpc(options={"num_worker_threads": 1})
def test_a_time_out_says_that_the_pool_is_busy(caller: Mesh, door: Gate) -> None:
    futures = [zrpc.rpc_async("worker1", knock) for _ in range(2)]
    explained(caller)
    with pytest.raises(
        zrpc.RpcTimeoutError, match=rf"error: max on worker1 .*; worker1 .* is alive: {BUSY}"
    ):
        zrpc.rpc_sync("worker1", max, args=(1, 2), timeout=0.1)
    door.opened.set()
    assert [future.wait() for future in futures] == ["in", "in"]
    wait_until_nothing_is_said(caller)


@pytest.mark.system
@pytest.mark.usefixtures("busy")
@pytest.mark.zrpc(options={"num_worker_threads": 1})
def test_the_description_of_a_loss_says_that_the_pool_was_busy(caller: Mesh, door: Gate) -> None:
    futures = [zrpc.rpc_async("worker1", knock) for _ in range(2)]
    assert "is alive" in explained(caller)
    leaves = caller.submit(1, zrpc.shutdown, graceful=False)
    for future in futures:
        with pytest.raises(zrpc.WorkerDied, match=f"; shortly before, {BUSY}"):
            future.wait()
    door.opened.set()
    leaves.result()


@pytest.mark.system
@pytest.mark.usefixtures("busy")
@pytest.mark.zrpc(workers=1, options={"num_worker_threads": 1})
def test_calls_to_oneself_know_too(caller: Mesh, door: Gate) -> None:
    futures = [zrpc.rpc_async("worker0", knock) for _ in range(2)]
    explained(caller, 0)
    with pytest.raises(zrpc.RpcTimeoutError, match=rf"worker0 .* is this worker: {BUSY}"):
        zrpc.rpc_sync("worker0", max, args=(1, 2), timeout=0.1)
    door.opened.set()
    assert [future.wait() for future in futures] == ["in", "in"]


async def holds_up() -> str:
    return knock()


async def begins() -> int:
    return 1


@pytest.mark.system
@pytest.mark.usefixtures("busy")
def test_a_time_out_says_that_the_event_loop_is_held_up(caller: Mesh, door: Gate) -> None:
    first = zrpc.rpc_async("worker1", holds_up)
    door.await_entry()
    second = zrpc.rpc_async("worker1", begins)
    explained(caller)
    with pytest.raises(zrpc.RpcTimeoutError, match=r"alive: its event loop has been held up "):
        zrpc.rpc_sync("worker1", begins, timeout=0.1)
    assert zrpc.rpc_sync("worker1", max, args=(1, 2)) == 2
    door.opened.set()
    assert first.wait() == "in"
    assert second.wait() == 1
    wait_until_nothing_is_said(caller)

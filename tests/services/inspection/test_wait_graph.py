"""Who waits for whom over all workers: the rules, over snapshots that are made up."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zrpc
from zrpc.services.inspection.circles import Circle
from zrpc.services.inspection.snapshot import Activity, Call, Frame, Member, Pool, Request, Snapshot
from zrpc.services.inspection.wait_graph import WaitGraph
from zrpc.wire.member_id import MemberId

RANKS, POOL_SIZE = range(3), 2


def idle_workers() -> dict[int, Snapshot]:
    members = [Member(rank, f"worker{rank}", "", True) for rank in RANKS]
    return {
        rank: Snapshot(rank, each.name, 1, "", "", members, Pool(POOL_SIZE, 0, 0, 0), [], [], [])
        for rank, each in enumerate(members)
    }


def thread(snapshot: Snapshot, handles: Request | None = None) -> Activity:
    name = f"thread{len(snapshot.activities)}"
    activity = Activity(name, [Frame("program.py", 7, "work")], own=handles is not None)
    if handles is not None:
        activity.request = (handles.caller, handles.id)
        snapshot.pool.running += 1
    snapshot.activities.append(activity)
    return activity


def call(caller: Snapshot, activity: Activity, callee: Snapshot, **fields: Any) -> Request:
    """Makes a call for which a thread of the caller waits; returns what the callee has."""
    number = len(caller.calls) + 1
    caller.calls.append(Call(number, callee.member, "function", "CALL", 5.0, None, True))
    activity.calls.append(number)
    callee.requests.append(Request(caller.member, number, "", "CALL", **fields))
    return callee.requests[-1]


def test_a_call_of_an_actor_needs_one_of_those_that_run_there() -> None:
    snapshots = idle_workers()
    here, there, main = snapshots[0], snapshots[1], thread(snapshots[0])
    runs = [call(here, main, there), call(here, main, there)]
    threads = [thread(there, each) for each in runs]
    for each in threads:  # both call their own actor
        call(there, each, there, actor="Log", behind=[(run.caller, run.id) for run in runs])
    assert WaitGraph(snapshots).cycles()
    threads[0].calls.clear()  # one of the two goes on, and then another call has its turn
    assert not WaitGraph(snapshots).cycles()


@pytest.mark.system
@settings(max_examples=200)
@given(st.data())
def test_what_is_struck_out_is_what_can_end(data: st.DataObject) -> None:
    """Against a simulation: whoever waits for nothing ends, and so answers its call."""
    snapshots = idle_workers()
    threads = [(0, thread(snapshots[0]))]
    # What each of them waits for: that another one ends, or any one of a worker's pool.
    waits: list[list[tuple[str, int]]] = [[]]
    for _ in range(data.draw(st.integers(1, 12))):
        number, to = data.draw(st.integers(0, len(threads) - 1)), data.draw(st.sampled_from(RANKS))
        rank, activity = threads[number]
        callee = snapshots[to]
        queued = callee.pool.running == POOL_SIZE
        request = call(snapshots[rank], activity, callee, queued=queued)
        wait = ("pool", to) if queued else ("thread", len(threads))
        waits[number].append(wait)
        if not queued:
            threads.append((to, thread(callee, request)))
            waits.append([])
        if data.draw(st.booleans()):  # another waits for the same future
            here = [each for each, (where, _) in enumerate(threads) if where == rank]
            other = data.draw(st.sampled_from(here))
            threads[other][1].calls.append(request.id)
            waits[other].append(wait)
    ended: set[int] = set()
    before = None
    while ended != before:
        before = ended
        # A thread that ends leaves its place to those that are queued: all of them get to run.
        done = {("thread", each) for each in ended}
        done |= {("pool", threads[each][0]) for each in ended if threads[each][1].own}
        ended = {each for each, needs in enumerate(waits) if done.issuperset(needs)}
    graph = WaitGraph(snapshots)
    hopeless = [graph.activity(node) for node in graph.hopeless() if node.kind == "activity"]
    stuck = [activity for each, (_, activity) in enumerate(threads) if each not in ended]
    assert sorted(map(id, hopeless)) == sorted(map(id, stuck))
    assert bool(graph.cycles()) == bool(stuck)


def test_bytes_that_are_no_circle_are_refused() -> None:
    for body in (b"", b"{", b"[]", b"[[[1]], 1]", b'[[["a", 1]], ""]', b"\xff"):
        with pytest.raises(zrpc.RpcError, match="expected a circle of calls"):
            Circle.parse(body)
    circle = Circle([(MemberId(1), 2)], "text \ud800")
    assert Circle.parse(circle.dump()) == circle

"""Who waits for whom over all workers: the rules, over snapshots that are made up."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zrpc.services.inspection.snapshot import Activity, Call, Frame, Member, Pool, Request, Snapshot
from zrpc.services.inspection.wait_graph import Node, WaitGraph


class World:
    """The snapshots of workers that the test makes up."""

    def __init__(self, workers: int, threads: int = 16) -> None:
        members = [Member(rank, f"worker{rank}", "", True) for rank in range(workers)]
        self.snapshots = {}
        for member in members:
            who = (member.member, member.name, 100 + member.member, "here", "")
            pool = Pool(threads, 0, 0, 0)
            self.snapshots[member.member] = Snapshot(*who, members, pool, [], [], [])

    def thread(self, rank: int, *, handles: Request | None = None, **fields: bool) -> Activity:
        activities = self.snapshots[rank].activities
        name = f"thread{len(activities)}"
        activity = Activity(name, [Frame("program.py", 7, "work")], **fields)
        if handles is not None:
            activity.request = (handles.caller, handles.id)
            self.snapshots[rank].pool.running += not fields.get("task", False)
        activities.append(activity)
        return activity

    def call(self, rank: int, activity: Activity, to: int, **fields: object) -> Request:
        """A call for which ``activity`` at ``rank`` waits; returns what the callee has."""
        snapshot = self.snapshots[rank]
        number = len(snapshot.calls) + 1
        snapshot.calls.append(Call(number, to, f"function{number}", "CALL", 5.0, None, True))
        activity.calls.append(number)
        request = Request(rank, number, "", "CALL", **fields)  # type: ignore[arg-type]
        self.snapshots[to].requests.append(request)
        return request

    @property
    def graph(self) -> WaitGraph:
        return WaitGraph(self.snapshots)


def ranks(cycle: list[tuple[Node, object]]) -> list[int]:
    return [node.member for node, _ in cycle if node.kind == "activity"]


def test_a_coroutine_needs_the_thread_of_its_loop() -> None:
    world = World(2)
    main = world.thread(0, own=False)
    loop = world.thread(0, handles=world.call(0, main, 0), loop=True)
    there = world.thread(1, handles=world.call(0, loop, 1))
    world.thread(0, handles=world.call(1, there, 0), task=True)
    [cycle] = world.graph.cycles()
    assert ranks(cycle) == [0, 1, 0]
    loop.calls.clear()  # it runs: soon it is the coroutine's turn
    assert world.graph.cycles() == []


def test_a_call_of_an_actor_needs_one_of_those_that_run_there() -> None:
    world = World(2)
    main = world.thread(0, own=False)
    runs = [world.call(0, main, 1), world.call(0, main, 1)]
    threads = [world.thread(1, handles=each) for each in runs]
    behind = [(each.caller, each.id) for each in runs]
    for thread in threads:  # both call their own actor
        world.call(1, thread, 1, actor="Log", behind=behind)
    [cycle, *_] = world.graph.cycles()
    assert any(node.kind == "request" and world.graph.request(node).behind for node, _ in cycle)
    threads[0].calls.clear()  # one of the two goes on, and then another call has its turn
    assert world.graph.cycles() == []


def test_only_workers_that_the_waits_lead_to_are_asked() -> None:
    world = World(4)
    first = world.thread(0)
    world.call(0, first, 1)
    second = world.thread(1, handles=world.snapshots[1].requests[0])
    world.call(1, second, 2)
    world.call(3, world.thread(3), 0)
    assert world.graph.leads_to([Node("activity", 0, (0,))]) == {1, 2}


@pytest.mark.system
@settings(max_examples=200)
@given(st.data())
def test_what_is_struck_out_is_what_can_end(data: st.DataObject) -> None:
    """Against a simulation: whoever waits for nothing ends, and so answers its call."""
    world = World(3, threads=2)
    activities = [(0, world.thread(0, own=False))]
    handlers: dict[tuple[int, int, int], int] = {}
    queued: dict[tuple[int, int, int], int] = {}
    for _ in range(data.draw(st.integers(1, 12))):
        rank, activity = data.draw(st.sampled_from(activities))
        to = data.draw(st.integers(0, 2))
        if world.snapshots[to].pool.running < 2:
            request = world.call(rank, activity, to)
            handlers[to, rank, request.id] = len(activities)
            activities.append((to, world.thread(to, handles=request)))
        else:
            request = world.call(rank, activity, to, queued=True)
            queued[to, rank, request.id] = to
        if data.draw(st.booleans()):  # another waits for the same future
            other = data.draw(st.sampled_from([d for r, d in activities if r == rank]))
            other.calls.append(request.id)
    # A thread that ends leaves its place to those who are queued: all of them get to run.
    ended: set[int] = set()
    free: dict[int, bool] = defaultdict(bool)
    while True:
        ends = {
            number
            for number, (rank, activity) in enumerate(activities)
            if all(
                _answered(world, rank, call, handlers, queued, ended, free)
                for call in activity.calls
            )
        }
        if ends == ended:
            break
        ended = ends
        for number in ended:
            rank, activity = activities[number]
            free[rank] |= activity.request is not None
    stuck = {number for number in range(len(activities)) if number not in ended}
    hopeless = world.graph.hopeless()
    numbers = {(rank, id(activity)): number for number, (rank, activity) in enumerate(activities)}
    found = {
        numbers[node.member, id(world.snapshots[node.member].activities[node.key[0]])]
        for node in hopeless
        if node.kind == "activity"
    }
    assert found == stuck
    assert bool(world.graph.cycles()) == bool(stuck)


def _answered(
    world: World,
    rank: int,
    call: int,
    handlers: dict[tuple[int, int, int], int],
    queued: dict[tuple[int, int, int], int],
    ended: set[int],
    free: dict[int, bool],
) -> bool:
    to = world.snapshots[rank].calls[call - 1].to
    if (to, rank, call) in queued:
        return free[to]
    return handlers[to, rank, call] in ended

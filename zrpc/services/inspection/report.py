"""The snapshots of a mesh as text for people."""

from __future__ import annotations

import linecache
import os
import re
import threading
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from zrpc.services.inspection.discovery import MeshView
from zrpc.services.inspection.snapshot import Activity, Actor, Call, Frame, Request, Snapshot
from zrpc.services.inspection.wait_graph import Link, Node, WaitGraph
from zrpc.wire.kind import Kind
from zrpc.wire.member_id import MemberId, rank_of

T = TypeVar("T")

_ZRPC = f"{Path(__file__).parents[2]}{os.sep}"
# The files that run programs and handlers.
_RUNNERS = (_ZRPC + "launch", os.path.join(_ZRPC, "calls", "execution.py"), threading.__file__)


class Report:
    """Describes one mesh, as far as its workers answered.

    If ``idle``, threads that wait for work, and zrpc's own frames, are shown too. Otherwise calls,
    requests and threads that differ in numbers only are shown once.

    Attributes:
        graph: what waits for what in it.
    """

    def __init__(self, mesh: MeshView, idle: bool = False) -> None:
        self._mesh = mesh
        self._idle = idle
        self.graph = WaitGraph(mesh.snapshots)
        self._calls = {(m, call.id): call for m, s in mesh.snapshots.items() for call in s.calls}
        linecache.checkcache()

    def heading(self) -> str:
        """Returns a line that says which mesh it is."""
        hosts = {snapshot.host for snapshot in self._mesh.snapshots.values()}
        size = len(self._mesh.names)
        return f"Mesh of {size} worker{'s' * (size > 1)} ({', '.join(sorted(hosts))})"

    def worker(self, snapshot: Snapshot) -> Iterator[str]:
        """Yields what a worker is doing, as lines; the first is its name."""
        yield f"{self._name(snapshot.member)}, pid {snapshot.pid}"
        yield f"  {_pool_text(snapshot)}"
        waiting = {call_id: each for each in snapshot.activities for call_id in each.calls}

        def kind_of_call(call: Call) -> Hashable:
            waits = waiting.get(call.id)
            return _asked_for(call), call.to, waits and waits.where

        def kind_of_request(request: Request) -> Hashable:
            return self._request(request), re.sub(r"[\d.]+", "", request.standing)

        for call, more in self._first_of_each(snapshot.calls, kind_of_call):
            yield f"  → {self._call(call)}{_waited_for(waiting.get(call.id))}{_and(more)}"
        for request, more in self._first_of_each(snapshot.requests, kind_of_request):
            asked = self._call_of(request)
            ago = "" if asked is None else f", called {asked.age:.1f} s ago,"
            yield f"  ← {self._request(request)}{ago} {request.standing}{_and(more)}"
        for actor in snapshot.actors:
            yield f"  {self._actor(snapshot.member, actor)}"
        for what, left in [
            ("calls", snapshot.calls_in_all - len(snapshot.calls)),
            ("requests", snapshot.requests_in_all - len(snapshot.requests)),
        ]:
            if left > 0:
                yield f"  and {left} more {what}"
        yield from self._stacks(snapshot)

    def _first_of_each(
        self, items: Iterable[T], kind: Callable[[T], Hashable]
    ) -> Iterator[tuple[T, int]]:
        """Yields the first item of each kind, and how many more there are."""
        kinds: dict[Hashable, list[T]] = {}
        for item in items:
            kinds.setdefault(id(item) if self._idle else kind(item), []).append(item)
        yield from ((first, len(more)) for first, *more in kinds.values())

    def _stacks(self, snapshot: Snapshot) -> Iterator[str]:
        shown = []
        idle = 0
        for number, activity in enumerate(snapshot.activities):
            if not self._idle and _is_idle(activity):
                idle += 1
            # Else the other worker of its process shows it.
            elif activity.own or activity.calls or self._is_first_of_process(snapshot):
                who = self._who(Node("activity", snapshot.member, (number,))).rstrip(",")
                frames = activity.frames if self._idle else _of_interest(activity)
                shown.append((activity, who, frames))

        def kind(thread: tuple[Activity, str, list[Frame]]) -> Hashable:
            activity, who, frames = thread
            return who.removeprefix(activity.name), activity.task, tuple(frames)

        for (activity, who, frames), more in self._first_of_each(shown, kind):
            title = who if activity.task or not frames else f"thread {who}"
            text = stack_text(f"{title}{_and(more)}", frames).rstrip()
            yield from (f"  {line}" for line in f"{text[:1].upper()}{text[1:]}".splitlines())
        if idle:
            yield f"  and {idle} thread{'s' * (idle > 1)} with nothing to do (--all shows them)"

    def silent(self) -> Iterator[str]:
        """Yields a line for each worker that could not be asked, and why."""
        for member, why in self._mesh.silent.items():
            pid = self._mesh.pids.get(member)
            who = f"{self._name(member)}, pid {pid}," if pid else self._name(member)
            yield f"{who} could not be asked: {why}"

    def cycles(self) -> list[list[str]]:
        """Returns the circles of waiting, each as lines."""
        return [
            [
                f"A circle of waiting over {_workers(cycle)}: none of these can go on.",
                *(f"{n}. {step}" for n, step in enumerate(self._steps(cycle), 1)),
                "and that is where it began.",
            ]
            for cycle in self.graph.cycles()
        ]

    def in_one_line(self, cycle: Sequence[tuple[Node, Link]]) -> str:
        """Returns a circle of the graph as a text of one line."""
        return " ".join(f"({n}) {step}" for n, step in enumerate(self._steps(cycle), 1))

    def comes_back(self) -> bool:
        """Returns whether it is worth looking again, for `suspects`."""
        return bool(self.graph.returns())

    def suspects(self, later: MeshView) -> list[list[str]]:
        """Returns the chains that come back to a worker whose thread stands still, as lines.

        That shows in the same mesh a while later.
        """
        found = []
        for path, end in self.graph.returns():
            activity = self.graph.activity(end)
            again = [
                other
                for other in getattr(later.snapshots.get(end.member), "activities", ())
                if (other.name, other.request) == (activity.name, activity.request)
            ]
            if activity.cpu is None or not again or again[0].cpu != activity.cpu:
                continue
            name = self._name(end.member)
            steps = self._steps(path)
            steps.append(f"{name}: {self._who(end)} stands still{_at(activity.where)}.")
            found.append(
                [
                    f"A chain of waiting comes back to {name}:",
                    *(f"{n}. {step}" for n, step in enumerate(steps, 1)),
                    "If it waits for what an earlier one holds, such as a lock, "
                    "none of them can go on.",
                ]
            )
        return found

    def as_dict(self) -> dict[str, object]:
        """Returns all of it, for programs."""
        return {
            "workers": [snapshot.as_dict() for snapshot in self._mesh.snapshots.values()],
            "silent": [
                {
                    "rank": rank_of(member),
                    "name": self._mesh.names[member],
                    "pid": self._mesh.pids.get(member),
                    "why": why,
                }
                for member, why in self._mesh.silent.items()
            ],
            "cycles": self.cycles(),
        }

    def _steps(self, path: Sequence[tuple[Node, Link]]) -> list[str]:
        """Returns the steps worth telling: not that a call is at its handler, or in a queue."""
        return [
            f"{self._name(node.member)}: {self._needs(node, link)}"
            for node, link in path
            if node.kind != "request" or link.to.kind == "request" or self.graph.request(node).rests
        ]

    def _is_first_of_process(self, snapshot: Snapshot) -> bool:
        key = (snapshot.host, snapshot.pid)
        same = [s.member for s in self._mesh.snapshots.values() if (s.host, s.pid) == key]
        return snapshot.member == min(same)

    def _name(self, member: MemberId) -> str:
        return f"{self._mesh.names.get(member, 'a worker')} (rank {rank_of(member)})"

    def _call(self, call: Call) -> str:
        left = "without a timeout" if call.left is None else f"times out in {call.left:.1f} s"
        return f"{_asked_for(call)} at {self._name(call.to)}, for {call.age:.1f} s, {left}"

    def _request(self, request: Request) -> str:
        return f"{self._what(request)} for {self._name(request.caller)}"

    def _actor(self, member: MemberId, actor: Actor) -> str:
        """Returns what an actor runs, and how many calls wait."""
        running = [Node("request", member, each) for each in actor.running]
        names = [
            self._request(self.graph.request(node)) for node in running if self.graph.knows(node)
        ]
        text = f"actor {actor.name}: runs {', '.join(names) or 'nothing'}"
        return f"{text}; {actor.waiting} calls wait" if actor.waiting else text

    def _what(self, request: Request) -> str:
        """Returns what is asked for. The caller knows the names of functions sent by value."""
        call = self._call_of(request)
        return request.what or (call.what if call is not None else "") or _asked_for(request)

    def _call_of(self, request: Request) -> Call | None:
        """Returns a request as its caller sees it, or None if that worker did not answer."""
        return self._calls.get((request.caller, request.id))

    def _who(self, node: Node) -> str:
        activity = self.graph.activity(node)
        if activity.request is not None:
            asked = Node("request", node.member, activity.request)
            if self.graph.knows(asked):  # else it ended while its worker was looked at
                return f"{activity.name}, which runs {self._request(self.graph.request(asked))},"
        return activity.name

    def _needs(self, node: Node, link: Link) -> str:
        if node.kind == "activity":
            activity = self.graph.activity(node)
            if link.call is not None:
                what = _asked_for(link.call)
                needs = f"{what} at {self._name(link.call.to)}, for {link.call.age:.1f} s"
                return f"{self._who(node)} waits for {needs}{_at(activity.where)}."
            return (
                f"{self._who(node)} needs the thread of its event loop, which another "
                "coroutine holds up: it waits there without `await`."
            )
        if node.kind == "queue":
            pool = self._mesh.snapshots[node.member].pool
            size = f"(num_worker_threads is {pool.size})"
            threads = f"all {pool.running} threads of its pool {size} wait"
            if pool.running == 1:
                threads = f"the only thread of its pool {size} waits"
            return f"what is queued can't begin: {threads} like this."
        request = self.graph.request(node)
        if request.rests:
            reader = self._name(link.to.member)
            return (
                f"the stream {self._request(request)} rests until its items are read at {reader}."
            )
        if request.behind and not request.actor:
            return (
                f"{self._request(request)} is in one batch with "
                f"{self._request(self.graph.request(link.to))}."
            )
        if request.behind:
            return (
                f"{self._request(request)} waits for its turn on the actor {request.actor}, which "
                f"runs {self._request(self.graph.request(link.to))}."
            )
        return (
            f"{self._request(request)} needs the value of an RRef, which "
            f"{self._request(self.graph.request(link.to))} is still to make."
        )


def stack_text(title: str, frames: Iterable[tuple[str, int, str]]) -> str:
    """Returns a stack as Python prints it, with lines of source that are read from this host.

    Each frame is a file, a line and a function, the innermost call last.
    """
    summaries = [traceback.FrameSummary(file, line, function) for file, line, function in frames]
    return f"{title}, most recent call last:\n" + "".join(traceback.format_list(summaries))


def _workers(cycle: Sequence[tuple[Node, Link]]) -> str:
    count = len({node.member for node, _ in cycle})
    return "one worker" if count == 1 else f"{count} workers"


def _asked_for(each: Call | Request) -> str:
    """Returns what users know a call by: a function's or method's name, or what makes it."""
    return each.what or ("to_here" if each.kind == Kind.FETCH.name else each.kind)


def _at(where: Frame | None) -> str:
    return "" if where is None else f", at {where}"


def _pool_text(snapshot: Snapshot) -> str:
    pool = snapshot.pool
    if pool.running <= pool.size:
        text = f"pool: {pool.running} of {pool.size} threads run"
    else:
        text = (
            f"pool: {pool.running} threads run, more than num_worker_threads ({pool.size}), as "
            "some use no processor time"
        )
    if pool.queued:
        text += f", {pool.queued} requests wait for one"
    if pool.full_for >= 1:
        text += f", as some have all the time for {pool.full_for:.0f} s"
    return text


def _and(more: int) -> str:
    return f", and {more} more like it" if more else ""


def _waited_for(activity: Activity | None) -> str:
    return "" if activity is None else f"; {activity.name} waits for it{_at(activity.where)}"


def _is_idle(activity: Activity) -> bool:
    """Returns whether a thread waits for work: the program's code isn't on its stack."""
    return activity.request is None and not activity.calls and activity.where is None


def _of_interest(activity: Activity) -> list[Frame]:
    """Returns the program's own frames and what they call.

    How a thread comes to run the program, and how zrpc waits for a call, is always the same.
    """
    frames = activity.frames
    if activity.where is None:
        return frames
    runners = [i + 1 for i, frame in enumerate(frames) if frame.file.startswith(_RUNNERS)]
    last = len(frames) - 1 - frames[::-1].index(activity.where)
    begin = max((i for i in runners if i <= last), default=0)
    return frames[begin : last + 2] if activity.calls else frames[begin:]

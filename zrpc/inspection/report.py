"""What workers told, as text for people."""

from __future__ import annotations

import linecache
import os
import threading
from collections.abc import Iterator, Sequence

from zrpc.inspection.meshes import MeshView
from zrpc.inspection.snapshot import Call, Doing, Frame, Request, Snapshot
from zrpc.inspection.stack_text import stack_text
from zrpc.inspection.wait_graph import Link, Node, WaitGraph
from zrpc.worker_info import rank_of

__all__ = ["Report"]

_ZRPC = os.path.dirname(os.path.dirname(__file__)) + os.sep
# Those that run programs and handlers.
_RUNNERS = (_ZRPC + "launch", _ZRPC + "execution.py", threading.__file__)


class Report:
    """What is to be said of one mesh.

    Args:
        mesh: what was seen.
        idle: whether to show threads that wait for work too, and zrpc's own frames.
    """

    def __init__(self, mesh: MeshView, idle: bool = False) -> None:
        self._mesh = mesh
        self._idle = idle
        self._graph = WaitGraph(mesh.snapshots)
        self._calls = {(r, call.id): call for r, s in mesh.snapshots.items() for call in s.calls}
        linecache.checkcache()

    def heading(self) -> str:
        """Which mesh it is."""
        hosts = {snapshot.host for snapshot in self._mesh.snapshots.values()}
        size = len(self._mesh.names)
        return f"Mesh of {size} worker{'s' * (size > 1)} ({', '.join(sorted(hosts))})"

    def worker(self, snapshot: Snapshot) -> Iterator[str]:
        """What a worker does, as lines; the first is its name."""
        yield f"{self._name(snapshot.rank)}, pid {snapshot.pid}"
        yield f"  {_pool_text(snapshot)}"
        waiting = {call_id: doing for doing in snapshot.doings for call_id in doing.calls}
        for call in snapshot.calls:
            yield f"  → {self._call(call)}{_waited_for(call, waiting.get(call.id))}"
        handlers = {doing.request: doing for doing in snapshot.doings if doing.request}
        for request in snapshot.requests:
            handler = handlers.get((request.caller, request.id))
            asked = self._call_of(request)
            ago = "" if asked is None else f", called {asked.age:.1f} s ago,"
            yield f"  ← {self._request(request)}{ago} {_state(request, handler)}"
        for what, left in [
            ("calls", snapshot.calls_in_all - len(snapshot.calls)),
            ("requests", snapshot.requests_in_all - len(snapshot.requests)),
        ]:
            if left > 0:
                yield f"  and {left} more {what}"
        for note in snapshot.notes:
            yield f"  {note}"
        idle = 0
        for number, doing in enumerate(snapshot.doings):
            if not self._idle and _is_idle(doing):
                idle += 1
                continue
            if not (doing.own or doing.calls or self._is_first_of_process(snapshot)):
                continue  # the other worker of its process shows it
            title = self._doer(Node("doing", snapshot.rank, (number,))).rstrip(",")
            frames = doing.frames if self._idle else _of_interest(doing)
            text = stack_text(title if doing.task else f"thread {title}", frames).rstrip()
            yield from (f"  {line}" for line in f"{text[:1].upper()}{text[1:]}".splitlines())
        if idle:
            yield f"  and {idle} thread{'s' * (idle > 1)} with nothing to do (--all shows them)"

    def silent(self) -> Iterator[str]:
        """Who could not be asked, and why, a line for each."""
        for rank, why in self._mesh.silent.items():
            pid = self._mesh.pids.get(rank)
            who = f"{self._name(rank)}, pid {pid}," if pid else self._name(rank)
            yield f"{who} could not be asked: {why}"

    def cycles(self) -> list[list[str]]:
        """The circles of waiting, each as lines."""
        return [
            [
                f"A circle of waiting over {_workers(cycle)}: none of these can go on.",
                *(f"{n}. {self._step(*step)}" for n, step in enumerate(_told(cycle), 1)),
                "and that is where it began.",
            ]
            for cycle in self._graph.cycles()
        ]

    def comes_back(self) -> bool:
        """Whether it is worth to look again, for `suspects`."""
        return bool(self._graph.returns())

    def suspects(self, later: MeshView) -> list[list[str]]:
        """Chains that come back to a worker, to a thread that stands still, each as lines.

        Args:
            later: the same mesh, seen a while later.
        """
        found = []
        for path, end in self._graph.returns():
            doing = self._graph.doing(end)
            again = [
                other
                for other in getattr(later.snapshots.get(end.rank), "doings", ())
                if (other.name, other.request) == (doing.name, doing.request)
            ]
            if doing.cpu is None or not again or again[0].cpu != doing.cpu:
                continue
            name = self._name(end.rank)
            steps = [self._step(*step) for step in _told(path)]
            steps.append(f"{name}: {self._doer(end)} stands still{_at(doing.where)}.")
            found.append(
                [
                    f"A chain of waiting comes back to {name}:",
                    *(f"{n}. {step}" for n, step in enumerate(steps, 1)),
                    "If it waits for what an earlier one holds, as a lock, none of them can go on.",
                ]
            )
        return found

    def as_dict(self) -> dict[str, object]:
        """All of it, for programs."""
        return {
            "workers": [snapshot.as_dict() for snapshot in self._mesh.snapshots.values()],
            "silent": [
                {
                    "rank": rank_of(rank),
                    "name": self._mesh.names[rank],
                    "pid": self._mesh.pids.get(rank),
                    "why": why,
                }
                for rank, why in self._mesh.silent.items()
            ],
            "cycles": self.cycles(),
        }

    def _is_first_of_process(self, snapshot: Snapshot) -> bool:
        key = (snapshot.host, snapshot.pid)
        same = [s.rank for s in self._mesh.snapshots.values() if (s.host, s.pid) == key]
        return snapshot.rank == min(same)

    def _name(self, rank: int) -> str:
        return f"{self._mesh.names.get(rank, 'a worker')} (rank {rank_of(rank)})"

    def _call(self, call: Call) -> str:
        left = "without a timeout" if call.left is None else f"times out in {call.left:.1f} s"
        return f"{call.what or call.kind} at {self._name(call.to)}, for {call.age:.1f} s, {left}"

    def _request(self, request: Request) -> str:
        return f"{self._what(request)} for {self._name(request.caller)}"

    def _what(self, request: Request) -> str:
        """What is asked for; the caller knows the names of functions that travel by value."""
        call = self._call_of(request)
        return request.what or (call.what if call is not None else "") or request.kind

    def _call_of(self, request: Request) -> Call | None:
        """The same, as its caller sees it, where that answered."""
        return self._calls.get((request.caller, request.id))

    def _doer(self, node: Node) -> str:
        doing = self._graph.doing(node)
        text = doing.name
        if doing.request is not None:
            asked = Node("request", node.rank, doing.request)
            text += f", which runs {self._request(self._graph.request(asked))},"
        return text

    def _step(self, node: Node, link: Link) -> str:
        return f"{self._name(node.rank)}: {self._needs(node, link)}"

    def _needs(self, node: Node, link: Link) -> str:
        if node.kind == "doing":
            doing = self._graph.doing(node)
            if link.call is not None:
                what = link.call.what or link.call.kind
                needs = f"{what} at {self._name(link.call.to)}, for {link.call.age:.1f} s"
                return f"{self._doer(node)} waits for {needs}{_at(doing.where)}."
            return (
                f"{self._doer(node)} needs the thread of its event loop, which another "
                "coroutine holds up: it waits there without `await`."
            )
        if node.kind == "queue":
            pool = self._mesh.snapshots[node.rank].pool
            size = f"(num_worker_threads is {pool.size})"
            threads = f"all {pool.running} threads of its pool {size} wait"
            if pool.running == 1:
                threads = f"the only thread of its pool {size} waits"
            return f"what is queued can't begin: {threads} like this."
        request = self._graph.request(node)
        return (
            f"{self._request(request)} needs the value of an RRef, which "
            f"{self._request(self._graph.request(link.to))} is still to make."
        )


def _told(path: Sequence[tuple[Node, Link]]) -> list[tuple[Node, Link]]:
    """The steps that need words: not that a call is at the one that runs it, or in a queue."""
    return [
        (node, link) for node, link in path if node.kind != "request" or link.to.kind == "request"
    ]


def _workers(cycle: Sequence[tuple[Node, Link]]) -> str:
    count = len({node.rank for node, _ in cycle})
    return "one worker" if count == 1 else f"{count} workers"


def _at(where: Frame | None) -> str:
    return "" if where is None else f", at {where}"


def _pool_text(snapshot: Snapshot) -> str:
    pool = snapshot.pool
    text = f"pool: {pool.running} of {pool.size} threads run"
    if pool.queued:
        text += f", {pool.queued} requests wait for one"
    if pool.full_for is not None and pool.full_for >= 1:
        text += f", as some have all the time for {pool.full_for:.0f} s"
    return text


def _waited_for(call: Call, doing: Doing | None) -> str:
    return "" if doing is None else f"; {doing.name} waits for it{_at(doing.where)}"


def _state(request: Request, doing: Doing | None) -> str:
    if doing is not None:
        return f"runs in {doing.name}"
    if request.queued:
        return "waits for a thread of the pool"
    if request.needs:
        return "waits for the value of an RRef"
    return "is answered later, by a future or a coroutine"


def _is_idle(doing: Doing) -> bool:
    """Whether a thread waits for work: nothing of the program's is on its stack."""
    return doing.request is None and not doing.calls and (doing.where is None)


def _of_interest(doing: Doing) -> list[Frame]:
    """The program's own frames and what they call: how a thread comes to run the program, and
    what zrpc does to wait for a call, is the same for all.
    """
    frames = doing.frames
    if doing.where is None:
        return frames
    runners = [i + 1 for i, frame in enumerate(frames) if frame.file.startswith(_RUNNERS)]
    last = len(frames) - 1 - frames[::-1].index(doing.where)
    begin = max((i for i in runners if i <= last), default=0)
    return frames[begin : last + 2] if doing.calls else frames[begin:]

"""What waits for what, over all workers of a mesh, and which waits form circles. No I/O in here.

A thread or a coroutine that waits for calls needs all of their answers. A call needs the handler
that runs for it. A queued call needs *any* thread of the pool. A call that asks for the value of an
RRef needs the call that makes the value. A call of an actor that waits for its turn needs *any* of
those that run there. A stream whose generator rests needs what reads its items, be that a thread or
a handler. What reads several streams at once needs *any* of them. A coroutine also needs the thread
of its event loop, which another handler may hold up. To find what can never go on, everything that
can is struck out, until nothing is left to strike out.

The snapshots need not be of one moment. A call has a number, and is outstanding from before it is
handled until after. So links between snapshots never join things that did not exist together, and
a circle that is found is one that stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from zrpc.services.inspection.snapshot import Activity, Call, Request, Snapshot
from zrpc.wire.member_id import MemberId


@dataclass(frozen=True, slots=True)
class Node:
    """Something that may wait.

    Attributes:
        kind: ``"activity"``: a thread or a coroutine; ``"request"``: a call at its callee;
            ``"queue"``: what is queued for a worker's pool.
        member: the worker.
        key: the index of the activity, or the caller and its number of the call.
    """

    kind: Literal["activity", "request", "queue"]
    member: MemberId
    key: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Link:
    """One wait of a node.

    Attributes:
        to: what must go on first.
        call: the call that is waited for; None if it is something else.
    """

    to: Node
    call: Call | None = None


class WaitGraph:
    """The waits of a mesh, as the snapshots of the workers that answered show them."""

    def __init__(self, snapshots: Mapping[MemberId, Snapshot]) -> None:
        self.snapshots = snapshots
        self._calls = {m: {c.id: c for c in s.calls} for m, s in snapshots.items()}
        activities = [
            (Node("activity", member, (number,)), activity)
            for member, snapshot in snapshots.items()
            for number, activity in enumerate(snapshot.activities)
        ]
        self._requests = {
            Node("request", member, (request.caller, request.id)): request
            for member, snapshot in snapshots.items()
            for request in snapshot.requests
        }
        requests = self._requests.items()
        # What handles each request: if a thread runs a coroutine, the thread.
        self._handlers: dict[Node, Node] = {}
        for node, activity in activities:
            if activity.request is not None:
                self._handlers.setdefault(Node("request", node.member, activity.request), node)
        # What reads each stream, unless it waits for that very stream: then credit is on its way.
        awaited = {(n.member, each) for n, activity in activities for each in activity.calls}
        self._readers = {
            (node.member, each): node for node, activity in activities for each in activity.reads
        }
        self._readers |= {
            (member, call.id): Node("request", member, call.reader)
            for member, snapshot in snapshots.items()
            for call in snapshot.calls
            if call.reader is not None
        }
        for stream in awaited:
            self._readers.pop(stream, None)
        self._makers = {(node.member, each.makes): node for node, each in requests if each.makes}
        # A node needs all of its links. But a queue, and a call that waits for its turn, need any.
        self._links = {
            node: list(self._of_activity(node.member, each)) for node, each in activities
        }
        self._links |= {node: list(self._of_request(node, each)) for node, each in requests}
        self._links |= {Node("queue", member): list(self._of_queue(member)) for member in snapshots}

    def activity(self, node: Node) -> Activity:
        """Returns the thread or coroutine of a node."""
        activity: Activity = self.snapshots[node.member].activities[node.key[0]]
        return activity

    def request(self, node: Node) -> Request:
        """Returns the call of a node, as its callee sees it."""
        return self._requests[node]

    def knows(self, node: Node) -> bool:
        """Returns whether a call is among those that its callee has reported."""
        return node in self._requests

    def leads_to(self, starts: Iterable[Node]) -> set[MemberId]:
        """Returns the workers of the calls that nodes wait for, directly or not."""
        found: set[MemberId] = set()
        left, seen = list(starts), set[Node]()
        while left:
            node = left.pop()
            if node in seen:
                continue
            seen.add(node)
            left += [link.to for link in self._links.get(node, ())]
            if node.kind == "activity":
                calls = self._calls[node.member]
                ids = self.activity(node).calls
                found.update(calls[each].to for each in ids if each in calls)
            elif node in self._requests and self._requests[node].rests:
                found.add(self._requests[node].caller)
        return found

    def hopeless(self) -> set[Node]:
        """Returns the nodes that can never go on."""
        left = {node for node, links in self._links.items() if links}
        before = -1
        while len(left) != before:
            before = len(left)
            left = {node for node in left if self._is_blocked(node, left)}
        return left

    def cycles(self) -> list[list[tuple[Node, Link]]]:
        """Returns the circles, each once: nodes, each with its wait for the next one."""
        hopeless = self.hopeless()
        found: dict[frozenset[Node], list[tuple[Node, Link]]] = {}
        for start in sorted(hopeless, key=_order):
            path: list[tuple[Node, Link]] = []
            node = start
            while node not in [passed for passed, _ in path]:
                link = next(link for link in self._links[node] if link.to in hopeless)
                path.append((node, link))
                node = link.to
            first = [passed for passed, _ in path].index(node)
            cycle = path[first:]
            found.setdefault(frozenset(passed for passed, _ in cycle), _turned(cycle))
        return list(found.values())

    def returns(self) -> list[tuple[list[tuple[Node, Link]], Node]]:
        """Returns chains of waits that come back to a worker, and end at something that runs.

        It may wait for what an earlier part of the chain holds, such as a lock, which can't be seen
        from here. Each end comes once, with its longest chain.
        """
        hopeless = self.hopeless()
        found: dict[Node, list[tuple[Node, Link]]] = {}
        for start in self._links:
            if start.kind != "activity" or start in hopeless:
                continue
            path: list[tuple[Node, Link]] = []
            node = start
            while self._links.get(node) and node.kind != "queue":
                path.append((node, self._links[node][0]))
                node = self._links[node][0].to
            passed = [n for n, _ in path if n.kind == "activity" and n.member == node.member]
            if node.kind == "activity" and passed and len(path) > len(found.get(node, ())):
                found[node] = path
        return [(path, end) for end, path in found.items()]

    def _is_blocked(self, node: Node, left: set[Node]) -> bool:
        waits = [link.to in left for link in self._links[node]]
        request = self._requests.get(node)
        needs_any = node.kind == "queue" or (request is not None and request.behind)
        if node.kind == "activity" and self.activity(node).any:
            # One whose callee has not told of it may go on.
            return all(waits) and len(waits) >= len(self.activity(node).calls)
        return all(waits) if needs_any else any(waits)

    def _of_activity(self, member: MemberId, activity: Activity) -> Iterator[Link]:
        for call_id in activity.calls:
            call = self._calls[member].get(call_id)
            if call is not None:
                request = Node("request", call.to, (member, call_id))
                if request in self._requests:
                    yield Link(request, call)
        if activity.task:
            for number, other in enumerate(self.snapshots[member].activities):
                if other.loop and other.calls:
                    yield Link(Node("activity", member, (number,)))

    def _of_request(self, node: Node, request: Request) -> Iterator[Link]:
        if request.rests:
            reader = self._readers.get((request.caller, request.id))
            if reader is not None:
                yield Link(reader)
        elif node in self._handlers:
            yield Link(self._handlers[node])
        elif request.queued:
            yield Link(Node("queue", node.member))
        elif request.behind:
            for each in request.behind:
                yield Link(Node("request", node.member, each))
        elif request.needs and (node.member, request.needs) in self._makers:
            yield Link(self._makers[node.member, request.needs])

    def _of_queue(self, member: MemberId) -> Iterator[Link]:
        snapshot = self.snapshots[member]
        if snapshot.pool.running < snapshot.pool.size:
            return  # a thread is about to take what is queued
        for number, each in enumerate(snapshot.activities):
            if each.own and each.request is not None and not each.task and not each.loop:
                yield Link(Node("activity", member, (number,)))


def _order(node: Node) -> tuple[str, int, tuple[int, ...]]:
    return node.kind, node.member, node.key


def _turned(cycle: list[tuple[Node, Link]]) -> list[tuple[Node, Link]]:
    """Returns the same circle, starting at its first thread or coroutine."""
    first = min(range(len(cycle)), key=lambda i: _order(cycle[i][0]))
    return cycle[first:] + cycle[:first]

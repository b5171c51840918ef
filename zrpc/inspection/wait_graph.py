"""Who waits for whom, over all workers of a mesh, and where that goes round in a circle. No I/O.

A thread or a coroutine that waits for calls needs all of their answers. A call needs the handler
that runs for it; one that is queued needs *any* thread of the pool; one that asks for the value
of an RRef needs the call that makes the value; and a coroutine needs the thread of its event loop
too, which a handler may hold up. Who can't go on whatever becomes of the others is found by
striking out all that can, until nothing is left to strike out.

The snapshots need not be of one moment. A call has a number, and is under way from before it is
handled until after: so links between snapshots can't be made up of things that never were
together, and a circle once found stays one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from zrpc.inspection.snapshot import Call, Doing, Request, Snapshot

__all__ = ["Link", "Node", "WaitGraph"]


@dataclass(frozen=True, slots=True)
class Node:
    """Something that may wait.

    Attributes:
        kind: ``"doing"``: a thread or a coroutine; ``"request"``: a call at its callee;
            ``"queue"``: what is queued for a worker's pool.
        rank: the worker's.
        key: which of the doings, or the caller and its number.
    """

    kind: Literal["doing", "request", "queue"]
    rank: int
    key: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Link:
    """What one waits for.

    Attributes:
        to: what has to go on first.
        call: by which call; None where it is none.
    """

    to: Node
    call: Call | None = None


class WaitGraph:
    """The waits of a mesh.

    Args:
        snapshots: by rank, of the workers that answered.
    """

    def __init__(self, snapshots: Mapping[int, Snapshot]) -> None:
        self.snapshots = snapshots
        self._calls = {r: {c.id: c for c in s.calls} for r, s in snapshots.items()}
        self._requests = {
            (rank, request.caller, request.id): request
            for rank, snapshot in snapshots.items()
            for request in snapshot.requests
        }
        # The thread before the coroutine that it runs.
        self._handlers: dict[tuple[int, int, int], Node] = {}
        self._makers: dict[tuple[int, str], Node] = {}
        self._links: dict[Node, list[Link]] = {}
        for rank, snapshot in snapshots.items():
            for number, doing in enumerate(snapshot.doings):
                if doing.request is not None:
                    node = Node("doing", rank, (number,))
                    self._handlers.setdefault((rank, *doing.request), node)
            for request in snapshot.requests:
                if request.makes:
                    node = Node("request", rank, (request.caller, request.id))
                    self._makers[rank, request.makes] = node
        for rank, snapshot in snapshots.items():
            for number, doing in enumerate(snapshot.doings):
                self._links[Node("doing", rank, (number,))] = list(self._of_doing(rank, doing))
            for request in snapshot.requests:
                node = Node("request", rank, (request.caller, request.id))
                self._links[node] = list(self._of_request(rank, request))
            self._links[Node("queue", rank)] = list(self._of_queue(rank))

    def doing(self, node: Node) -> Doing:
        """The thread or coroutine of a node."""
        return self.snapshots[node.rank].doings[node.key[0]]

    def request(self, node: Node) -> Request:
        """The call, as its callee sees it."""
        return self._requests[node.rank, node.key[0], node.key[1]]

    def links(self, node: Node) -> list[Link]:
        """What a node waits for: all of it, but for a queue any of it."""
        return self._links.get(node, [])

    def hopeless(self) -> set[Node]:
        """Those that can never go on."""
        left = {node for node, links in self._links.items() if links}
        before = -1
        while len(left) != before:
            before = len(left)
            left = {node for node in left if self._is_blocked(node, left)}
        return left

    def cycles(self) -> list[list[tuple[Node, Link]]]:
        """The circles, each once: the nodes with what they wait for, which is the next one."""
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
        """Chains of waits that end at a worker that they have passed, by something that runs.

        That may wait for what an earlier part of the chain holds, as a lock, which can't be seen
        from here. Each end comes once, with its longest chain.
        """
        hopeless = self.hopeless()
        found: dict[Node, list[tuple[Node, Link]]] = {}
        for start in self._links:
            if start.kind != "doing" or start in hopeless:
                continue
            path: list[tuple[Node, Link]] = []
            node = start
            while self._links.get(node) and node.kind != "queue":
                path.append((node, self._links[node][0]))
                node = self._links[node][0].to
            passed = [n for n, _ in path if n.kind == "doing" and n.rank == node.rank]
            if node.kind == "doing" and passed and len(path) > len(found.get(node, ())):
                found[node] = path
        return [(path, end) for end, path in found.items()]

    def _is_blocked(self, node: Node, left: set[Node]) -> bool:
        waits = [link.to in left for link in self._links[node]]
        return all(waits) if node.kind == "queue" else any(waits)

    def _of_doing(self, rank: int, doing: Doing) -> Iterator[Link]:
        for call_id in doing.calls:
            call = self._calls[rank].get(call_id)
            if call is not None and (call.to, rank, call_id) in self._requests:
                yield Link(Node("request", call.to, (rank, call_id)), call)
        if doing.task:
            for number, other in enumerate(self.snapshots[rank].doings):
                if other.loop and other.calls:
                    yield Link(Node("doing", rank, (number,)))

    def _of_request(self, rank: int, request: Request) -> Iterator[Link]:
        handler = self._handlers.get((rank, request.caller, request.id))
        if handler is not None:
            yield Link(handler)
        elif request.queued:
            yield Link(Node("queue", rank))
        elif request.needs and (rank, request.needs) in self._makers:
            yield Link(self._makers[rank, request.needs])

    def _of_queue(self, rank: int) -> Iterator[Link]:
        snapshot = self.snapshots[rank]
        if snapshot.pool.running < snapshot.pool.size:
            return  # a thread is about to take what is queued
        for number, doing in enumerate(snapshot.doings):
            if doing.own and doing.request is not None and not doing.task and not doing.loop:
                yield Link(Node("doing", rank, (number,)))


def _order(node: Node) -> tuple[str, int, tuple[int, ...]]:
    return node.kind, node.rank, node.key


def _turned(cycle: list[tuple[Node, Link]]) -> list[tuple[Node, Link]]:
    """The same circle, from its first thread or coroutine on."""
    first = min(range(len(cycle)), key=lambda i: _order(cycle[i][0]))
    return cycle[first:] + cycle[:first]

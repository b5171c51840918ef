"""Finds actors that wait for each other, and which calls must fail so that they go on.

No I/O in here. A worker that owns an actor looks for circles when calls wait there behind others
that wait themselves. It begins with a snapshot of itself, and asks the workers that the waits lead
to, and no others: what they are doing, and for whom they wait in turn. What the wait graph shows as
stuck then stays so: the calls that wait for their turn in the circle fail, and so the others go on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from typing_extensions import Buffer

from zrpc.errors import RpcError, expecting
from zrpc.services.inspection.discovery import MeshView
from zrpc.services.inspection.report import Report
from zrpc.services.inspection.snapshot import Snapshot
from zrpc.services.inspection.wait_graph import Node, WaitGraph
from zrpc.wire.member_id import MemberId

_MAX_TEXT = 4000


class Circle(NamedTuple):
    """Calls of a circle that wait for their turn on the actors of one worker.

    Attributes:
        calls: the caller and the number of each.
        text: the circle, for people.
    """

    calls: Sequence[tuple[MemberId, int]]
    text: str

    def error(self, stops: bool = False) -> RpcError:
        """Returns the error of one of these calls.

        Args:
            stops: whether it is a ``stop()``, which takes effect nevertheless.
        """
        consequence = (
            "The actor is stopped, and ends when the others have ended: this call no longer waits"
            if stops
            else "This call was not begun, so that the others go on. Make it later (after a "
            "stream's end, or its close()), or mark a method of the circle with @zrpc.concurrent"
        )
        error = RpcError(
            "actors wait in a circle, so that none of these calls could go on: "
            f"{self.text} {consequence}"
        )
        error.executed = None if stops else False
        return error

    def dump(self) -> bytes:
        """Returns what `parse` reads."""
        return json.dumps(self).encode(errors="surrogatepass")

    @classmethod
    @expecting("a circle of calls")
    def parse(cls, body: Buffer) -> Circle:
        """Reads what `dump` wrote.

        Raises:
            ProtocolError: the body is something else.
        """
        calls, text = json.loads(bytes(body))
        found = [(MemberId(int(caller)), int(number)) for caller, number in calls]
        return cls(found, str(text)[:_MAX_TEXT])


class CircleSearch:
    """One search for circles. For one thread at a time.

    Args:
        own: this worker.
        snapshot: of it.
        names: of the members.
        begun: when the search began.
    """

    def __init__(
        self, own: MemberId, snapshot: Snapshot, names: Mapping[MemberId, str], begun: float
    ) -> None:
        self.begun = begun
        self._own = own
        self._names = names
        self._snapshots = {own: snapshot}
        self._asked = {own}

    def to_ask(self) -> Sequence[MemberId]:
        """Returns the members to ask next; empty if others are still to answer, or none is left."""
        if self._asked - self._snapshots.keys():
            return ()
        graph = WaitGraph(self._snapshots)
        found = sorted(graph.leads_to(self._starts()) - self._asked)
        self._asked.update(found)
        return found

    def take(self, snapshot: Snapshot) -> None:
        """Takes the answer of a member."""
        if snapshot.member in self._asked:
            self._snapshots[snapshot.member] = snapshot

    def circles(self) -> Mapping[MemberId, Sequence[Circle]]:
        """Returns the circles, by the members whose actors' calls must fail; at its end."""
        if self._asked - self._snapshots.keys():
            return {}
        report = Report(MeshView(self._snapshots, names=dict(self._names)))
        found: dict[MemberId, list[Circle]] = {}
        for cycle, text in report.circles():
            waiting: dict[MemberId, list[Any]] = {}
            for node, _ in cycle:
                if node.kind == "request" and report.graph.request(node).actor:
                    waiting.setdefault(node.member, []).append(node.key)
            for member, calls in waiting.items():
                found.setdefault(member, []).append(Circle(calls, text[:_MAX_TEXT]))
        return found

    def _starts(self) -> list[Node]:
        requests = self._snapshots[self._own].requests
        return [
            Node("request", self._own, (each.caller, each.id)) for each in requests if each.behind
        ]

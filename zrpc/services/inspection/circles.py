"""Finds actors that wait for each other, and which calls must fail so that they go on.

A worker that owns an actor looks for circles when calls wait there behind others
that wait themselves. It begins with a snapshot of itself, and asks the workers that the waits lead
to, and no others: what they are doing, and for whom they wait in turn. What the wait graph shows as
stuck then stays so: the calls that wait for their turn in the circle fail, and so the others go on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from typing_extensions import Buffer

from zrpc.agent.agent import Agent
from zrpc.errors import RpcError, expecting
from zrpc.services.inspection.collect import take_snapshot
from zrpc.services.inspection.discovery import MeshView
from zrpc.services.inspection.report import Report
from zrpc.services.inspection.snapshot import Snapshot
from zrpc.services.inspection.wait_graph import Node, WaitGraph
from zrpc.services.rref.service import RRefService
from zrpc.wire.kind import Kind
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message

# The question: what waits there, and for what?
WAITS = "waits"

# How long a call must have waited for its turn before a circle is looked for; how often that is
# done; and after which time a search without an answer is done again. All calls of a circle fail
# within two seconds.
_LONG_SECONDS = 0.4
_INTERVAL_SECONDS = 0.4
_PATIENCE_SECONDS = 1.5
_MAX_ENTRIES = 1000
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
    """One search for circles, without I/O. For one thread at a time.

    Args:
        snapshot: of this worker.
        begun: when the search began.
    """

    def __init__(self, snapshot: Snapshot, begun: float) -> None:
        self.begun = begun
        self._own = snapshot
        self._snapshots = {snapshot.member: snapshot}
        self._asked = {snapshot.member}

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
        names = {each.member: each.name for each in self._own.members}
        report = Report(MeshView(self._snapshots, names=names))
        found: dict[MemberId, list[Circle]] = {}
        for cycle in report.graph.cycles():
            waiting: dict[MemberId, list[Any]] = {}
            for node, _ in cycle:
                if node.kind == "request" and report.graph.request(node).actor:
                    waiting.setdefault(node.member, []).append(node.key)
            for member, calls in waiting.items():
                found.setdefault(member, []).append(
                    Circle(calls, report.in_one_line(cycle)[:_MAX_TEXT])
                )
        return found

    def _starts(self) -> list[Node]:
        own = self._own
        waiting = [each for each in own.requests if each.behind]
        return [Node("request", own.member, (each.caller, each.id)) for each in waiting]


class ActorCircles:
    """Finds circles of actors. For the thread that receives.

    Args:
        agent: of this worker.
        ask: asks a member what waits there, and returns the number of the question.
    """

    def __init__(self, agent: Agent, ask: Callable[[MemberId], int]) -> None:
        self._agent = agent
        self._ask = ask
        self._search: CircleSearch | None = None
        self._numbers: set[int] = set()  # of the questions of the present search
        self._next_look = 0.0

    def look(self, now: float) -> None:
        """Begins a search if calls wait behind others that wait themselves; to be called often."""
        if self._search is not None and now > self._search.begun + _PATIENCE_SECONDS:
            self._search = None
        if self._search is not None or now < self._next_look or not self._is_suspicious(now):
            return
        self._next_look = now + _INTERVAL_SECONDS
        self._search = CircleSearch(take_snapshot(self._agent, _MAX_ENTRIES), now)
        self._numbers.clear()
        self._go_on()

    def take(self, number: int, body: bytes) -> bool:
        """Takes an answer; returns False if it answers no question of the present search."""
        if number not in self._numbers:
            return False
        self._numbers.discard(number)
        if self._search is not None:
            self._search.take(Snapshot.parse(body))
            self._go_on()
        return True

    def on_circle(self, message: Message) -> None:
        """Fails calls that another worker has found in a circle."""
        self._fail(Circle.parse(message.body))

    def _is_suspicious(self, now: float) -> bool:
        """Returns whether calls wait for their turn, and what runs there waits for calls."""
        for mailbox in list(self._agent.service(RRefService).busy):
            for running, waiting in mailbox.look():
                waits = any(now - each.scope.arrived > _LONG_SECONDS for each in waiting)
                if waits and running and _all_wait(running):
                    return True
        return False

    def _go_on(self) -> None:
        search = self._search
        if search is None or self._numbers:
            return
        lost = self._agent.membership.lost
        members = search.to_ask()
        self._numbers.update(self._ask(member) for member in members if member not in lost)
        if self._numbers:
            return
        self._search = None
        for member, circles in search.circles().items():
            for circle in circles:
                if member == self._agent.membership.own_id:
                    self._fail(circle)
                else:
                    self._agent.outbox.post(member, Message(Kind.CIRCLE, body=circle.dump()))

    def _fail(self, circle: Circle) -> None:
        for caller, number in circle.calls:
            request: Any = self._agent.callee.requests.get(caller, number)
            mailbox = None if request is None else request.scope.mailbox
            # What was seen at different moments need no longer be so: a stream may run on.
            if mailbox is not None and any(
                request in waiting and _all_wait(running) for running, waiting in mailbox.look()
            ):
                error = circle.error(stops=request.kind == Kind.STOP)
                mailbox.do(mailbox.refuse(request.scope, error))


def _all_wait(running: Sequence[Message]) -> bool:
    """Returns whether all that runs on an actor waits for calls, or for the reader of its items."""
    return all(each.scope.rests or each.scope.children() for each in running)

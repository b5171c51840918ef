"""Looks for actors that wait for each other, while calls of this worker's actors wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from zrpc.agent.agent import Agent
from zrpc.services.inspection.circles import Circle, CircleSearch
from zrpc.services.inspection.collect import take_snapshot
from zrpc.services.inspection.snapshot import Snapshot
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
        agent = self._agent
        names = {member: info.name for member, info in agent.membership.infos.items()}
        snapshot = take_snapshot(agent, _MAX_ENTRIES)
        self._search = CircleSearch(agent.membership.own_id, snapshot, names, now)
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
        for mailbox in self._agent.service(RRefService).mailboxes():
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

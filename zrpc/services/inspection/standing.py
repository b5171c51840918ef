"""Where requests stand at their callee, and whether they have to wait, as text.

Requests wait in two places: in the queue of the pool, and at the event loop, whose thread is held
up by a coroutine that does not ``await``.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from functools import cached_property

from zrpc.agent.agent import Agent
from zrpc.calls.cancel_scope import CancelScope
from zrpc.calls.function_names import asked_for, handler_name
from zrpc.services.inspection.questions import Standings
from zrpc.services.inspection.stacks import requests_to_begin
from zrpc.wire.kind import Kind
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message

__all__ = ["Work", "where_calls_stand"]

# The thread that looks receives nothing meanwhile. So it looks at this number of requests at most,
# and describes this number of them: the oldest.
_MAX_REQUESTS = 1000
_MAX_TOLD = 100
_MAX_GROUPS = 3
# How long requests must have waited before that is told.
_SHORT_SECONDS = 0.5


def where_calls_stand(agent: Agent, caller: MemberId, call_ids: Sequence[int]) -> Standings:
    """Returns where some calls of a worker stand, the oldest first. In the I/O thread."""
    accepted = [agent.callee.requests.get(caller, each) for each in call_ids]
    here = [request for request in accepted if request is not None]
    work = Work(agent)
    told = {request.call_id: work.standing(request) for request in here[:_MAX_TOLD]}
    return Standings(dict.fromkeys([each.call_id for each in here], "") | told, work.load())


class Work:
    """What a worker has to do at one moment. May be used in any thread.

    Attributes:
        pool: what its pool has to do.
        places: the places of requests in the queue of the pool, by identity.
    """

    def __init__(self, agent: Agent) -> None:
        self._names = agent.membership.infos
        self._now = time.monotonic()
        self.pool = agent.pool.load(_MAX_REQUESTS)
        queued = [getattr(job, "request", None) for job in self.pool.backlog]
        self.places = {id(request): place for place, request in enumerate(queued, 1) if request}
        # The requests whose coroutines wait for the event loop, and since when; and how many do.
        self._coming = {id(each): each.scope.started for each in requests_to_begin(agent)}
        self._count_coming = len(agent.event_loop.coming())
        oldest = agent.callee.requests.all()[:_MAX_REQUESTS]
        self._running = [request for request in oldest if self._runs(request)]

    def _runs(self, request: Message) -> bool:
        """Returns whether a thread runs a request, and does not wait for another worker."""
        scope: CancelScope = request.scope
        left = scope.deferred or scope.in_task or id(request) in self._coming
        return bool(scope.started) and not left and not any(c.waiters for c in scope.children())

    def load(self) -> str:
        """Returns whether requests have to wait, as a sentence; empty if not, or for a moment."""
        return "; ".join(filter(None, (self._load_of_pool(), self._load_of_loop())))

    def _load_of_pool(self) -> str:
        size, running, *_, full_for, queued, _ = self.pool
        if full_for < _SHORT_SECONDS:
            return ""
        threads = f"all {running} threads of its pool have been busy"
        if running == 1:
            threads = "the only thread of its pool has been busy"
        elif running < size:
            threads = f"its pool has got no thread beyond its {running}"
        waiting = "a request waits" if queued == 1 else f"{queued} requests wait"
        latest = max((request.scope.started for request in self._running), default=0.0)
        idle_for = min(full_for, self._now - latest)
        begun = f"; none was begun for {idle_for:.0f} s" if idle_for >= 1 else ""
        return f"{threads} for {full_for:.0f} s and {waiting}{begun}"

    def _load_of_loop(self) -> str:
        held_for = self._now - min(self._coming.values(), default=self._now)
        if held_for < _SHORT_SECONDS:
            return ""
        count = self._count_coming
        waiting = "a coroutine waits" if count == 1 else f"{count} coroutines wait"
        return (
            f"its event loop has been held up for {held_for:.0f} s, by a coroutine that does not "
            f"`await`, and {waiting} to begin"
        )

    def standing(self, request: Message) -> str:
        """Returns where a request stands: "queued ..." or "running ...", for example."""
        scope: CancelScope = request.scope
        here = f"for {self._now - scope.arrived:.1f} s"
        started = f"for {self._now - (scope.started or scope.arrived):.1f} s"
        if place := self.places.get(id(request)):
            return f"queued {here}{self._behind}, at place {place} of {self.pool.queued}"
        if id(request) in self._coming:
            return f"waiting {started} for the event loop to begin it"
        if scope.deferred:
            return f"waiting {started} for the future that its function has returned"
        if scope.started:
            what = asked_for(handler_name(request), request.kind)
            return f"running `{what}` {started}{self._waits(scope)}"
        what = "the value of an RRef" if request.kind == Kind.FETCH else "its turn"
        return f"waiting {here} for {what}"

    @cached_property
    def _behind(self) -> str:
        """Returns which calls run, so that others are queued behind them."""
        groups = Counter(
            (each.scope.caller.name, asked_for(handler_name(each), each.kind))
            for each in self._running
        )
        first = groups.most_common(_MAX_GROUPS)
        texts = [
            f"{count} calls of {caller} that run `{what}`"
            if count > 1
            else f"a call of {caller} that runs `{what}`"
            for (caller, what), count in first
        ]
        if rest := len(self._running) - sum(count for _, count in first):
            texts.append(f"{rest} others")
        return f" behind {' and '.join(texts)}" if texts else ""

    def _waits(self, scope: CancelScope) -> str:
        """Returns for which call the handler of a scope has waited the longest."""
        calls = [call for call in scope.children() if call.waiters or scope.in_task]
        if not calls:
            return ""
        first = min(calls, key=lambda call: call.begun)
        what, callee = asked_for(first.what, first.kind), self._names[first.peer].name
        return f", and has waited for `{what}` at {callee} for {self._now - first.begun:.1f} s"

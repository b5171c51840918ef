"""What a worker is doing, inside its process: for its callers, and as a snapshot.

Requests wait in two places: in the queue of the pool, and at the event loop, whose thread is held
up by a coroutine that does not ``await``.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from zrpc.agent.agent import Agent
from zrpc.agent.shutdown import Phase
from zrpc.agent.stats import take_stats
from zrpc.calls.cancel_scope import CancelScope
from zrpc.calls.function_names import asked_for, handler_name, kind_name, readable
from zrpc.calls.pending_call import NEVER, PendingCall
from zrpc.options import DEFAULT_WARN_AFTER_SEC
from zrpc.services.actors.mailbox import Mailbox
from zrpc.services.inspection.questions import Standings
from zrpc.services.inspection.snapshot import Actor, Call, Member, Pool, Request, Snapshot
from zrpc.services.inspection.stacks import (
    activities,
    first_of_batch,
    requests_to_begin,
    waiters_of,
)
from zrpc.services.rref.service import RRefService
from zrpc.services.streams.service import StreamService
from zrpc.wire.kind import Kind, Tag
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message

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
    work = _Work(agent)
    told = {request.call_id: work.standing(request) for request in here[:_MAX_TOLD]}
    return Standings(dict.fromkeys([each.call_id for each in here], "") | told, work.load())


class _Work:
    """What a worker has to do at one moment. May be used in any thread.

    Attributes:
        pool: what its pool has to do.
        places: the places of requests in the queue of the pool, by identity.
        mailboxes: those of the worker's actors.
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
        self.mailboxes = agent.service(RRefService).mailboxes()
        # The calls that wait for their turn on an actor: its name, what runs there, and the place.
        self.turns: dict[int, tuple[str, list[Message], int]] = {
            id(request): (mailbox.title, running, place)
            for mailbox in self.mailboxes
            for running, waiting in mailbox.look()
            for place, request in enumerate(waiting, 1)
        }

    def _runs(self, request: Message) -> bool:
        """Returns whether a thread runs a request, and does not wait for another worker."""
        scope: CancelScope = request.scope
        left = scope.rests or (scope.deferred and not scope.in_steps)
        left = left or scope.in_task or id(request) in self._coming
        return bool(scope.started) and not left and not any(map(waiters_of, scope.children()))

    def load(self) -> str:
        """Returns whether requests have to wait, as a sentence; empty if not, or for a moment."""
        return "; ".join(filter(None, (self._load_of_pool(), self._load_of_loop())))

    def _load_of_pool(self) -> str:
        size, running, queued = self.pool.size, self.pool.running, self.pool.queued
        full_for, idle_for = self.pool.full_for, self.pool.none_begun_for
        if full_for < _SHORT_SECONDS:
            return ""
        threads = f"all {running} threads of its pool have been busy"
        if running < size:
            at_work = running + self.pool.waiting
            threads = (
                f"the system has allowed its pool no thread beyond {at_work} (see `ulimit -u`)"
            )
        elif running == 1:
            threads = "the only thread of its pool has been busy"
        waiting = "a request waits" if queued == 1 else f"{queued} requests wait"
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
        if scope.thread and not scope.started:  # it is counted before the answer is sent
            return "being answered"
        if scope.rests:
            return f"a generator that began {started[4:]} ago, and rests until its items are read"
        if scope.deferred and not scope.in_steps:
            return f"waiting {started} for {scope.outcome_from}"
        if scope.started:
            what = asked_for(handler_name(request), request.kind)
            return f"running `{what}` {started}{self._waits(scope)}"
        if turn := self.turns.get(id(request)):
            return f"waiting {here} for its turn on the actor {self._turn(*turn)}"
        what = "the value of an RRef" if _rrefs(request)[1] else "its turn"
        return f"waiting {here} for {what}"

    def _turn(self, actor: str, running: Sequence[Message], place: int) -> str:
        """Returns the name of an actor, at which place a call waits there, and what runs."""
        if not running:
            return f"{actor}, whose caller has made earlier calls that have not arrived"
        first = running[0]
        text = f"{actor}, at place {place}, behind {_of_handler(first)}"
        return text if len(running) == 1 else f"{text} and {len(running) - 1} others"

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
        calls = [call for call in scope.children() if waiters_of(call) or scope.in_task]
        if not calls:
            return ""
        first = min(calls, key=lambda call: call.begun)
        what, callee = asked_for(first.what, first.kind), self._names[first.peer].name
        return f", and has waited for `{what}` at {callee} for {self._now - first.begun:.1f} s"


def _of_handler(request: Message) -> str:
    """Returns what a request runs, and for whom."""
    what = asked_for(handler_name(request), request.kind)
    return f"a call of {request.scope.caller.name} that runs `{what}`"


def take_snapshot(agent: Agent, max_entries: int) -> Snapshot:
    """Returns what a worker is doing. May be called from any thread; it takes some milliseconds.

    It has at most ``max_entries`` threads, calls, requests and jobs each. With 0 it has numbers
    instead.
    """
    work = _Work(agent)
    load = work.pool
    found = activities(agent)[:max_entries] if max_entries else []
    handled = {activity.request for activity in found}
    waited_for = {call_id for activity in found for call_id in activity.calls}
    calls, readers = agent.caller.calls.in_flight(), agent.service(StreamService).readers()
    requests = agent.callee.requests.all()
    # First those that something waits for, or works on.
    calls.sort(key=lambda call: call.call_id not in waited_for)
    requests.sort(key=lambda request: (request.sender, request.call_id) not in handled)
    return Snapshot(
        member=agent.membership.own_id,
        name=agent.worker_info.name,
        pid=os.getpid(),
        host=socket.gethostname(),
        directory=agent.membership.own_record.directory,
        members=_members(agent),
        pool=Pool(load.size, load.running, load.threads, load.queued, load.full_for),
        activities=found,
        calls=[
            _call(call, call.call_id in waited_for, readers.get(call.call_id))
            for call in calls[:max_entries]
        ],
        requests=[_request(each, work) for each in requests[:max_entries]],
        actors=[_actor(each) for each in work.mailboxes[:max_entries]],
        calls_in_all=len(calls),
        requests_in_all=len(requests),
        stats=None if max_entries else _numbers(agent),
    )


def _members(agent: Agent) -> list[Member]:
    membership = agent.membership
    return [
        Member(
            member=member,
            name=info.name,
            directory=membership.records[member].directory,
            same_host=membership.shares_host(member),
            lost=agent.why_gone(member) if member in membership.lost else "",
            silence=agent.liveness.silence(member),
        )
        for member, info in sorted(membership.infos.items())
        if membership.was_found(member)
    ]


def _call(call: PendingCall, waited_for: bool, reader: Any) -> Call:
    now = time.monotonic()
    return Call(
        id=call.call_id,
        to=call.peer,
        what=readable(call.what),
        kind=kind_name(call.kind),
        age=max(0.0, now - call.begun),
        left=None if call.deadline == NEVER else max(0.0, call.deadline - now),
        waited_for=waited_for,
        reader=(reader.caller.member_id, reader.call_id)
        if isinstance(reader, CancelScope)
        else None,
    )


def _rrefs(request: Message) -> tuple[str, str]:
    """Returns the RRef whose value a request makes, and that whose value it needs."""
    subject = (request.attachments or {}).get(Tag.SUBJECT, ())
    rrefs = [f"{each.created_on}:{each.local_id}" for each in subject]
    # `remote` names the RRef that it makes, the caller's fork, and an RRef whose method it calls.
    # Last comes the place in the order of an actor's calls.
    makes, needs = (rrefs[:1], rrefs[2:3]) if request.kind == Kind.REMOTE else ([], rrefs[:1])
    return "".join(makes), "".join(needs)


def _request(request: Message, work: _Work) -> Request:
    makes, needs = _rrefs(request)
    actor, running, _ = work.turns.get(id(request), ("", [], 0))
    first = first_of_batch(request)
    return Request(
        caller=request.sender,
        id=request.call_id,
        what=handler_name(request),
        kind=kind_name(request.kind),
        queued=id(request) in work.places,
        standing=work.standing(request),
        makes=makes,
        needs=needs,
        actor=actor,
        behind=[(each.sender, each.call_id) for each in running] if first is None else [first],
        rests=request.scope.rests,
    )


def _actor(mailbox: Mailbox) -> Actor:
    lanes = mailbox.look()
    running = [(each.sender, each.call_id) for runs, _ in lanes for each in runs]
    return Actor(mailbox.title, running, sum(len(waiting) for _, waiting in lanes))


def _numbers(agent: Agent) -> dict[str, Any]:
    """Returns a worker's `zrpc.stats`, its processor time, memory and state, ready for JSON."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        **asdict(take_stats(agent)),
        "cpu_seconds": time.process_time(),
        "memory_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "state": _state(agent),
    }


def _state(agent: Agent) -> str:
    if any(service.stats().get("breakpoints") for service in agent.services):
        return "at a breakpoint"
    phase = agent.graceful_shutdown.phase
    if phase >= Phase.BEGUN:
        return "serving" if phase == Phase.BEGUN else "leaving"
    # A stream may be read for as long as its worker lives.
    calls = (call for call in agent.caller.calls.in_flight() if call.kind != Kind.STREAM)
    oldest = next(calls, None)
    limit = agent.options.warn_after or DEFAULT_WARN_AFTER_SEC
    if oldest is not None and time.monotonic() - oldest.begun >= limit:
        return "stuck"
    return "running"

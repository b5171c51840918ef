"""Makes a snapshot of a worker, from inside of its process."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from zrpc.agent import Agent
from zrpc.calls import NEVER, PendingCall
from zrpc.execution import Execution
from zrpc.inspection.activities import Activity, activities, of_coroutines, users_frame
from zrpc.inspection.function_names import function_of, kind_name, readable
from zrpc.inspection.snapshot import Call, Doing, Member, Pool, Request, Snapshot
from zrpc.rref.layer import SUBJECT
from zrpc.wire.header import Message
from zrpc.wire.kind import Kind

__all__ = ["coming_requests", "queued_requests", "survey"]

# Of threads, calls, requests and jobs each, no more than so many are told: whoever makes this
# receives nothing meanwhile.
_MOST = 1000


def survey(agent: Agent, full_for: float | None, notes: Sequence[str]) -> Snapshot:
    """What a worker does now. May be called from any thread; it takes some milliseconds.

    Args:
        agent: the worker's.
        full_for: for how long requests had to wait for a thread, in seconds; None if they don't.
        notes: sentences to add.
    """
    load = agent.pool.load(_MOST)
    found = activities(agent)[:_MOST]
    names = {id(a.request): a.function for a in found if a.request is not None}
    queued = {id(request) for request in _requests_in(load.backlog)}
    waited_for = {call.call_id for activity in found for call in activity.calls}
    calls = agent.caller.calls.under_way()
    requests = agent.callee.requests.all()
    # Those that somebody waits for, or works for, before the others.
    calls.sort(key=lambda call: call.call_id not in waited_for)
    requests.sort(key=lambda request: id(request) not in names)
    cards = agent.membership.cards
    return Snapshot(
        rank=agent.membership.rank,
        name=agent.worker_info.name,
        pid=os.getpid(),
        host=socket.gethostname(),
        directory=cards[agent.membership.rank].directory,
        members=_members(agent),
        pool=Pool(load.size, load.running, load.threads, load.queued, full_for),
        doings=[_doing(activity) for activity in found],
        calls=[_call(call, call.call_id in waited_for) for call in calls[:_MOST]],
        requests=[
            _request(request, names.get(id(request), ""), id(request) in queued)
            for request in requests[:_MOST]
        ],
        calls_in_all=len(calls),
        requests_in_all=len(requests),
        notes=list(notes),
    )


def queued_requests(agent: Agent) -> list[Message]:
    """The requests that wait for a thread of the pool."""
    return list(_requests_in(agent.pool.load(_MOST).backlog))


def coming_requests(agent: Agent) -> list[Message]:
    """The requests whose coroutines wait for their event loop, to begin."""
    _, coming = agent.event_loop.under_way()
    found = of_coroutines(agent, coming[:_MOST])
    return [activity.request for activity in found if activity.request is not None]


def _requests_in(jobs: Iterable[Any]) -> Iterable[Message]:
    """The requests that jobs of the pool are for."""
    for job in jobs:
        if isinstance(job, Execution):
            yield job.request
        elif isinstance(job, Message):
            yield job
        elif isinstance(job, partial):
            yield from list(_requests_in((*job.args, getattr(job.func, "__self__", None))))[:1]


def _members(agent: Agent) -> list[Member]:
    membership = agent.membership
    return [
        Member(
            rank=number,
            name=info.name,
            directory=membership.cards[number].directory,
            same_host=membership.shares_host(number),
            lost=agent.why_gone(number) if number in membership.lost else "",
        )
        for number, info in sorted(membership.infos.items())
        if membership.was_found(number)
    ]


def _doing(activity: Activity) -> Doing:
    request = activity.request
    return Doing(
        name=activity.name,
        frames=activity.frames,
        where=users_frame(activity.frames),
        own=activity.own,
        task=activity.task,
        loop=activity.loop,
        cpu=_cpu_time(activity.ident),
        calls=[call.call_id for call in activity.calls],
        request=None if request is None else (request.sender, request.call_id),
        what=activity.function,
    )


def _cpu_time(ident: int) -> float | None:
    if not ident or sys.platform != "linux":
        return None
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(ident))
    except OSError:
        return None


def _call(call: PendingCall, waited_for: bool) -> Call:
    now = time.monotonic()
    return Call(
        id=call.call_id,
        to=call.peer,
        what=readable(call.what),
        kind=kind_name(call.kind),
        age=max(0.0, now - call.begun),
        left=None if call.deadline == NEVER else max(0.0, call.deadline - now),
        waited_for=waited_for,
    )


def _request(request: Message, function: str, queued: bool) -> Request:
    makes = needs = ""
    values = (request.attachments or {}).get(SUBJECT)
    if values and request.kind == Kind.REMOTE:
        makes, needs = _value(values[0]), _value(values[2]) if len(values) > 2 else ""
    elif values:
        needs = _value(values[0])
    return Request(
        caller=request.sender,
        id=request.call_id,
        what=function or function_of(request),
        kind=kind_name(request.kind),
        queued=queued,
        makes=makes,
        needs=needs,
    )


def _value(rref_id: Any) -> str:
    return f"{rref_id.created_on}:{rref_id.local_id}"

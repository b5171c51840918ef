"""Makes a snapshot of a worker, inside its process."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Sequence
from typing import Any

from zrpc.agent.agent import Agent
from zrpc.calls.function_names import handler_name, kind_name, readable
from zrpc.calls.pending_call import NEVER, PendingCall
from zrpc.services.inspection.numbers import take_numbers
from zrpc.services.inspection.snapshot import Call, Member, Pool, Request, Snapshot
from zrpc.services.inspection.stacks import activities
from zrpc.wire.kind import Kind, Tag
from zrpc.wire.message import Message

__all__ = ["queued_requests", "take_snapshot"]


def take_snapshot(
    agent: Agent, full_for: float | None, notes: Sequence[str], max_entries: int
) -> Snapshot:
    """Returns what a worker is doing. May be called from any thread; it takes some milliseconds.

    It has at most ``max_entries`` threads, calls, requests and jobs each. With 0 it has the numbers
    of `zrpc.services.inspection.numbers` instead.
    """
    load = agent.pool.load(max_entries)
    found = activities(agent)[:max_entries] if max_entries else []
    handled = {activity.request for activity in found}
    waited_for = {call_id for activity in found for call_id in activity.calls}
    queued = {id(request) for request in _requests_of(load.backlog)}
    calls = agent.caller.calls.in_flight()
    requests = agent.callee.requests.all()
    # First those that something waits for, or works on.
    calls.sort(key=lambda call: call.call_id not in waited_for)
    requests.sort(key=lambda request: (request.sender, request.call_id) not in handled)
    records = agent.membership.records
    return Snapshot(
        member=agent.membership.own_id,
        name=agent.worker_info.name,
        pid=os.getpid(),
        host=socket.gethostname(),
        directory=records[agent.membership.own_id].directory,
        members=_members(agent),
        pool=Pool(load.size, load.running, load.threads, load.queued, full_for),
        activities=found,
        calls=[_call(call, call.call_id in waited_for) for call in calls[:max_entries]],
        requests=[_request(each, id(each) in queued) for each in requests[:max_entries]],
        calls_in_all=len(calls),
        requests_in_all=len(requests),
        notes=list(notes),
        stats=None if max_entries else take_numbers(agent),
    )


def queued_requests(agent: Agent, max_jobs: int) -> list[Message]:
    """Returns the requests among the first jobs that wait for a thread of the pool."""
    return _requests_of(agent.pool.load(max_jobs).backlog)


def _requests_of(jobs: Iterable[Any]) -> list[Message]:
    """Returns the requests that jobs of the pool are for; other jobs have none."""
    return [job.request for job in jobs if isinstance(getattr(job, "request", None), Message)]


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


def _request(request: Message, queued: bool) -> Request:
    makes = needs = ""
    values = (request.attachments or {}).get(Tag.SUBJECT)
    if values and request.kind == Kind.REMOTE:
        makes, needs = _rref_name(values[0]), _rref_name(values[2]) if len(values) > 2 else ""
    elif values:
        needs = _rref_name(values[0])
    return Request(
        caller=request.sender,
        id=request.call_id,
        what=handler_name(request),
        kind=kind_name(request.kind),
        queued=queued,
        makes=makes,
        needs=needs,
    )


def _rref_name(rref_id: Any) -> str:
    return f"{rref_id.created_on}:{rref_id.local_id}"

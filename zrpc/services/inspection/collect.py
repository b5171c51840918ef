"""Makes a snapshot of a worker, inside its process."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zrpc.agent.agent import Agent
from zrpc.agent.shutdown import Phase
from zrpc.agent.stats import take_stats
from zrpc.calls.function_names import handler_name, kind_name, readable
from zrpc.calls.pending_call import NEVER, PendingCall
from zrpc.options import DEFAULT_WARN_AFTER_SEC
from zrpc.services.inspection.snapshot import Call, Member, Pool, Request, Snapshot
from zrpc.services.inspection.stacks import activities
from zrpc.services.inspection.standing import Work
from zrpc.wire.kind import Kind, Tag
from zrpc.wire.message import Message

__all__ = ["take_snapshot"]


def take_snapshot(agent: Agent, max_entries: int) -> Snapshot:
    """Returns what a worker is doing. May be called from any thread; it takes some milliseconds.

    It has at most ``max_entries`` threads, calls, requests and jobs each. With 0 it has numbers
    instead.
    """
    work = Work(agent)
    load = work.pool
    found = activities(agent)[:max_entries] if max_entries else []
    handled = {activity.request for activity in found}
    waited_for = {call_id for activity in found for call_id in activity.calls}
    calls = agent.caller.calls.in_flight()
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
        calls=[_call(call, call.call_id in waited_for) for call in calls[:max_entries]],
        requests=[_request(each, work) for each in requests[:max_entries]],
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


def _request(request: Message, work: Work) -> Request:
    subject = (request.attachments or {}).get(Tag.SUBJECT, ())
    rrefs = [f"{each.created_on}:{each.local_id}" for each in subject]
    # `remote` names the RRef that it makes, the caller's fork, and an RRef whose method it calls.
    makes, needs = (rrefs[:1], rrefs[2:]) if request.kind == Kind.REMOTE else ([], rrefs)
    return Request(
        caller=request.sender,
        id=request.call_id,
        what=handler_name(request),
        kind=kind_name(request.kind),
        queued=id(request) in work.places,
        standing=work.standing(request),
        makes="".join(makes),
        needs="".join(needs),
    )


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
    if agent.graceful_shutdown.phase >= Phase.BEGUN:
        return "leaving"
    oldest = agent.caller.calls.oldest()
    limit = agent.options.warn_after or DEFAULT_WARN_AFTER_SEC
    if oldest is not None and time.monotonic() - oldest.begun >= limit:
        return "stuck"
    return "running"

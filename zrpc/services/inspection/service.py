"""Plugs inspection into an agent.

It warns of slow calls, reports full pools to callers, and answers questions about
what the worker is doing.
"""

from __future__ import annotations

import itertools
import logging
import struct
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from typing_extensions import override

from zrpc.agent.agent import Agent
from zrpc.agent.service import Handler, Service
from zrpc.errors import ProtocolError
from zrpc.services.inspection.collect import queued_requests, take_snapshot
from zrpc.services.inspection.congestion import Congestion, Place, Report, Reports
from zrpc.services.inspection.listener import NUMBERS, OTHERS, SELF, Listener, Visitor
from zrpc.services.inspection.stacks import requests_to_begin
from zrpc.services.inspection.stuck import StuckCalls
from zrpc.wire.kind import Kind
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message

__all__ = ["InspectionService"]

logger = logging.getLogger(__name__)

# How many threads, calls, requests and jobs each a snapshot has: the thread that takes it receives
# nothing meanwhile.
_MAX_ENTRIES = 1000

# A question to workers on other hosts, with which their answers begin: its number, and whether it
# asks for what they have done, in numbers.
_QUESTION = struct.Struct("<Q?")


class InspectionService(Service):
    """Tells a worker's log, its peers and its user what the worker is doing.

    All of it is done in the agent's ticks, by the thread that receives. Calls pass through none
    of it.
    """

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self._queues = {place: Congestion(place) for place in Place}
        self._reports = Reports()
        self._stuck = StuckCalls(agent, agent.options.warn_after, self.explain)
        self._listener = self._open_listener()
        # For each question about other hosts: who asks, and the members still to answer.
        self._asked: dict[int, tuple[Visitor, set[MemberId]]] = {}
        self._numbers = itertools.count(1)

    @override
    def handlers(self) -> Mapping[Kind, Handler]:
        return {
            Kind.BUSY: self._on_busy,
            Kind.INSPECT: self._on_inspect,
            Kind.SNAPSHOT: self._on_snapshot,
        }

    @override
    def explain(self, member: MemberId) -> str:
        membership = self.agent.membership
        info = membership.infos.get(member)
        if info is None:
            return ""
        name = f"{info.name} (rank {info.id})"
        now = time.monotonic()
        if member == self.agent.membership.own_id:
            reports = [self._own_report(place, now) for place in Place]
            texts = [report.text() for report in reports if report is not None]
            return f"; {name} is this worker: {'; '.join(texts)}" if texts else ""
        text = self._reports.describe(member, name, now, member in membership.lost)
        return f"; {text}" if text else ""

    @override
    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()

    # -- in the I/O thread ---------------------------------------------------------------

    @override
    def tick(self) -> None:
        """Warns of calls, reports full pools to callers, and answers visitors."""
        now = time.monotonic()
        pool = self.agent.pool
        if self._queues[Place.POOL].observe_queue(now, pool.queued, pool.begun):
            waiting = queued_requests(self.agent, _MAX_ENTRIES)
            self._report_to_callers(Place.POOL, waiting, now)
        if self._queues[Place.LOOP].observe_queue(now, len(self.agent.event_loop.coming()), 0):
            self._report_to_callers(Place.LOOP, requests_to_begin(self.agent), now)
        try:
            self._stuck.check_calls(now)
            if self._listener is not None:
                self._listener.serve(now)
        except Exception:
            # Reading the stacks of other threads must never end the thread that receives.
            logger.exception("%s goes on after an error", self.agent.worker_info)

    def _report_to_callers(self, place: Place, requests: Iterable[Message], now: float) -> None:
        """Tells peers that their requests wait, or no longer do."""
        waiting = {request.sender for request in requests} - {self.agent.membership.own_id}
        reports = self._queues[place].reports_for(now, waiting, self._own_report(place, now))
        for member, report in reports.items():
            self.agent.outbox.post(member, Message(Kind.BUSY, body=report.pack()))

    def _own_report(self, place: Place, now: float) -> Report | None:
        if place is Place.LOOP:
            return self._queues[place].report(now, 1, 1, len(self.agent.event_loop.coming()))
        load = self.agent.pool.load(0)
        return self._queues[place].report(now, load.size, load.running, load.queued)

    def _on_busy(self, message: Message) -> None:
        self._reports.record(message.sender, Report.parse(message.body), time.monotonic())

    def _open_listener(self) -> Listener | None:
        directory = self.agent.membership.own_record.directory
        if not directory:
            return None
        try:
            return Listener(Path(directory), self._answer_visitor)
        except OSError as error:
            logger.warning("zrpc stacks can't ask %s: %s", self.agent.worker_info, error)
            return None

    def _answer_visitor(self, visitor: Visitor, question: str) -> None:
        numbers = question.endswith(NUMBERS)
        about = question.removesuffix(NUMBERS)
        if about == SELF:
            visitor.write(self._dump_snapshot(numbers))
        if about != OTHERS or not self._ask_other_hosts(visitor, numbers):
            visitor.finish()

    def _dump_snapshot(self, numbers: bool) -> bytes:
        if numbers:
            return take_snapshot(self.agent, None, (), 0).dump()
        notes = [self.explain(member).lstrip("; ") for member in self._reports.members()]
        full_for = self._queues[Place.POOL].full_for(time.monotonic())
        return take_snapshot(self.agent, full_for, notes, _MAX_ENTRIES).dump()

    def _ask_other_hosts(self, visitor: Visitor, numbers: bool) -> bool:
        """Asks the members on other hosts; returns whether there are any."""
        membership = self.agent.membership
        members = {member for member in membership.living if not membership.shares_host(member)}
        members.discard(membership.own_id)
        self._asked = {n: asked for n, asked in self._asked.items() if not asked[0].closed}
        number = next(self._numbers)
        if members:
            self._asked[number] = (visitor, members)
        for member in sorted(members):
            question = Message(Kind.INSPECT, body=_QUESTION.pack(number, numbers))
            self.agent.outbox.post(member, question)
        return bool(members)

    def _on_inspect(self, message: Message) -> None:
        """Answers a member whose user asks what workers on other hosts are doing."""
        number, numbers = _question_of(message)
        body = _QUESTION.pack(number, numbers) + self._dump_snapshot(numbers)
        self.agent.outbox.post(message.sender, Message(Kind.SNAPSHOT, body=body))

    def _on_snapshot(self, message: Message) -> None:
        number, _ = _question_of(message)
        visitor, members = self._asked.get(number, (None, set()))
        if visitor is None or message.sender not in members:
            return
        members.discard(message.sender)
        visitor.write(bytes(message.body[_QUESTION.size :]).replace(b"\n", b" "))
        if not members:
            del self._asked[number]
            visitor.finish()


def _question_of(message: Message) -> tuple[int, bool]:
    try:
        return _QUESTION.unpack_from(message.body)
    except struct.error as error:
        raise ProtocolError(f"expected the number of a question: {error}") from error

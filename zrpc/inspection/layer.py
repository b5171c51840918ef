"""Plugs into an agent: warns of calls that wait, tells peers of a full pool, and answers those
who ask what the worker does.
"""

from __future__ import annotations

import itertools
import logging
import struct
import time
from collections.abc import Iterable
from pathlib import Path

from zrpc.agent import Agent
from zrpc.errors import ProtocolError
from zrpc.inspection.congestion import Congestion, Place, Report, Reports
from zrpc.inspection.listener import OTHERS, SELF, Listener, Visitor
from zrpc.inspection.stuck import StuckCalls
from zrpc.inspection.survey import coming_requests, queued_requests, survey
from zrpc.wire.header import Message
from zrpc.wire.kind import Kind

__all__ = ["InspectionLayer", "plug_in"]

logger = logging.getLogger(__name__)

# Of a question to workers on other hosts; it comes back before the answer.
_NUMBER = struct.Struct("<Q")


class InspectionLayer:
    """What a worker does, told to its log, its peers and its user.

    All of it is done in the agent's ticks, by the thread that receives; nothing is added to the
    way of a call.

    Args:
        agent: the agent; this layer registers its handler there.
    """

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self._queues = {place: Congestion(place) for place in Place}
        self._reports = Reports()
        self._stuck = StuckCalls(agent, agent.warn_after, self.explain)
        self._listener = self._listen()
        # Who asks about other hosts, and the ranks whose answers are still to come.
        self._asked: dict[int, tuple[Visitor, set[int]]] = {}
        self._numbers = itertools.count(1)
        agent.dispatcher.register(Kind.BUSY, self._on_busy)
        agent.dispatcher.register(Kind.INSPECT, self._on_inspect)
        agent.dispatcher.register(Kind.SNAPSHOT, self._on_snapshot)
        agent.caller.calls.explain = self.explain
        agent.tickers.append(self._tick)

    def explain(self, rank: int) -> str:
        """For the errors of calls to a worker: what is known of its pool. From any thread."""
        membership = self.agent.membership
        info = membership.infos.get(rank)
        if info is None:
            return ""
        name = f"{info.name} (rank {info.id})"
        now = time.monotonic()
        if rank == self.agent.membership.rank:
            reports = [self._report(place, now) for place in Place]
            texts = [report.text() for report in reports if report is not None]
            return f"; {name} is this worker: {'; '.join(texts)}" if texts else ""
        about = self._reports.about(rank, name, now, rank in membership.lost)
        return f"; {about}" if about else ""

    # -- the layer -----------------------------------------------------------------------

    def lose(self, rank: int) -> None:
        """A peer is gone."""

    def quiet(self) -> bool:
        """Whether nothing is under way on our part: nobody waits for what is done here."""
        return True

    def close(self) -> None:
        """Answers nobody any more."""
        if self._listener is not None:
            self._listener.close()

    # -- in the I/O thread ---------------------------------------------------------------

    def _tick(self) -> None:
        now = time.monotonic()
        pool = self.agent.pool
        if self._queues[Place.POOL].look(now, pool.queued, pool.begun):
            self._tell(Place.POOL, queued_requests(self.agent), now)
        if self._queues[Place.LOOP].look(now, self.agent.event_loop.coming, 0):
            self._tell(Place.LOOP, coming_requests(self.agent), now)
        try:
            self._stuck.look(now)
            if self._listener is not None:
                self._listener.serve(now)
        except Exception:
            # What is read from the stacks of others must never be what ends them.
            logger.exception("%s goes on after an error", self.agent.worker_info)

    def _tell(self, place: Place, requests: Iterable[Message], now: float) -> None:
        """Tells peers whose requests wait that they do, or that they don't any more."""
        waiting = {request.sender for request in requests} - {self.agent.membership.rank}
        said = self._queues[place].tell(now, waiting, self._report(place, now))
        for rank, body in said.items():
            self.agent.outbox.post(rank, Message(Kind.BUSY, body=body), counted=False)

    def _report(self, place: Place, now: float) -> Report | None:
        if place is Place.LOOP:
            return self._queues[place].report(now, 1, 1, self.agent.event_loop.coming)
        load = self.agent.pool.load(0)
        return self._queues[place].report(now, load.size, load.running, load.queued)

    def _on_busy(self, message: Message) -> None:
        place, report = Report.parse(bytes(message.body))
        self._reports.note(message.sender, place, report, time.monotonic())

    def _listen(self) -> Listener | None:
        membership = self.agent.membership
        directory = membership.cards[membership.rank].directory
        if not directory:
            return None
        try:
            return Listener(Path(directory), self._answer)
        except OSError as error:
            logger.warning("zrpc stacks can't ask %s: %s", self.agent.worker_info, error)
            return None

    def _answer(self, visitor: Visitor, question: str) -> None:
        if question == SELF:
            visitor.write(self._survey())
        if question == OTHERS:
            self._ask_other_hosts(visitor)
        else:
            visitor.finish()

    def _survey(self) -> bytes:
        notes = [self.explain(rank).lstrip("; ") for rank in self._reports.ranks()]
        full_for = self._queues[Place.POOL].full_for(time.monotonic())
        return survey(self.agent, full_for, notes).dump()

    def _ask_other_hosts(self, visitor: Visitor) -> None:
        membership = self.agent.membership
        ranks = {rank for rank in membership.living if not membership.shares_host(rank)}
        ranks.discard(self.agent.membership.rank)
        if not ranks:
            visitor.finish()
            return
        self._asked = {n: asked for n, asked in self._asked.items() if not asked[0].closed}
        number = next(self._numbers)
        self._asked[number] = (visitor, ranks)
        for rank in sorted(ranks):
            self.agent.outbox.post(
                rank, Message(Kind.INSPECT, body=_NUMBER.pack(number)), counted=False
            )

    def _on_inspect(self, message: Message) -> None:
        """A member is asked by its user what the others do."""
        body = bytes(message.body[: _NUMBER.size]) + self._survey()
        self.agent.outbox.post(message.sender, Message(Kind.SNAPSHOT, body=body), counted=False)

    def _on_snapshot(self, message: Message) -> None:
        try:
            (number,) = _NUMBER.unpack_from(message.body)
        except struct.error as error:
            raise ProtocolError(f"expected the number of a question: {error}") from error
        visitor, ranks = self._asked.get(number, (None, set()))
        if visitor is None or message.sender not in ranks:
            return
        ranks.discard(message.sender)
        visitor.write(bytes(message.body[_NUMBER.size :]).replace(b"\n", b" "))
        if not ranks:
            del self._asked[number]
            visitor.finish()


def plug_in(agent: Agent) -> InspectionLayer:
    """Has an agent tell what it does; see `InspectionLayer`."""
    return InspectionLayer(agent)

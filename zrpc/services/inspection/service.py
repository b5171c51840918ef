"""Plugs inspection into an agent: the questions what a worker does, and their answers.

A worker asks its callees where its slow calls stand (see `zrpc.services.inspection.questions`), and
warns of them. It answers its callers, and the visitors of its private socket, who may also ask what
the members on other hosts do.
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from typing_extensions import override

from zrpc.agent.agent import Agent
from zrpc.agent.service import Handler, Service
from zrpc.errors import ProtocolError, RpcError
from zrpc.services.inspection.collect import take_snapshot
from zrpc.services.inspection.listener import NUMBERS, OTHERS, SELF, Listener, Visitor
from zrpc.services.inspection.questions import Answer, Questions, dump_question, read_question
from zrpc.services.inspection.standing import Work, where_calls_stand
from zrpc.services.inspection.stuck import StuckCalls
from zrpc.wire.kind import Kind
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message

__all__ = ["InspectionService"]

logger = logging.getLogger(__name__)

# How many threads, calls, requests and jobs each a snapshot has: the thread that takes it receives
# nothing meanwhile.
_MAX_ENTRIES = 1000
# Slow calls are looked for so often while a callee is asked once.
_LOOKS_PER_QUESTION = 4

# With this a question and its answer begin: the question's number, the way, the number of ways, and
# how many messages went that way before.
_HEAD = struct.Struct("<QBBQ")


class InspectionService(Service):
    """Tells a worker's log, its peers and its user what the worker is doing and waiting for.

    All of it is done in the agent's ticks, by the thread that receives, except for sending each
    way, since another thread may be copying a large message into the mailbox. Calls pass through
    none of it.

    Attributes:
        rules: what callees are asked, and what their answers mean.
    """

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self.rules = Questions()
        self._looked_at = float("-inf")
        limit = agent.options.warn_after
        self._stuck = StuckCalls(agent, limit, self.explain, self.rules.standing)
        self._listener = self._open_listener()
        # For each question about other hosts: who asks, and the members still to answer.
        self._visits: dict[int, tuple[Visitor, set[MemberId]]] = {}

    @override
    def handlers(self) -> Mapping[Kind, Handler]:
        return {Kind.ASK: self._on_question, Kind.TELL: self._on_answer}

    @override
    def on_member_lost(self, member: MemberId) -> None:
        self.rules.forget(member)

    @override
    def explain(self, member: MemberId, call_id: int = 0) -> str:
        membership = self.agent.membership
        info = membership.infos.get(member)
        if info is None:
            return ""
        name = f"{info.name} (rank {info.id})"
        if member == membership.own_id:
            text = Work(self.agent).load()
            return text and f"; {name} is this worker: {text}"
        lost = member in membership.lost
        text = self.rules.describe(member, call_id, name, time.monotonic(), lost)
        return text and f"; {text}"

    @override
    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()

    # -- what this worker asks -----------------------------------------------------------

    @override
    def tick(self) -> None:
        """Asks the callees of slow calls, answers visitors, and warns of calls."""
        now = time.monotonic()
        if now - self._looked_at >= self.rules.timing.question_seconds / _LOOKS_PER_QUESTION:
            self._looked_at = now
            self._ask_callees(now)
        if self._listener is not None:
            self._listener.serve(now)
        self._stuck.check_calls(now)

    def _ask_callees(self, now: float) -> None:
        waiting: dict[MemberId, list[int]] = {member: [] for member in self.agent.awaited_members()}
        for call in self.agent.caller.calls.in_flight():
            if now - call.begun < self.rules.timing.question_seconds:
                break  # those that follow are younger
            if call.left:
                waiting.setdefault(call.peer, []).append(call.call_id)
        for member in (self.agent.membership.own_id, *self.agent.membership.lost):
            waiting.pop(member, None)
        if len(self.agent.outbox):  # some of these calls may not have been sent after all
            return
        self.rules.ask_only(waiting)
        for member, call_ids in waiting.items():
            number, asked = self.rules.ask(member, call_ids, now)
            if number:
                self._send_each_way(member, Kind.ASK, number, dump_question(asked))

    def _on_answer(self, message: Message) -> None:
        number, body = self._read(message)
        if number in self._visits:
            self._pass_on(number, message.sender, body)
            return
        calls = self.agent.caller.calls
        answer, waiting = Answer.parse(body), calls.by_id
        now = time.monotonic()
        for call_id in self.rules.take_answer(message.sender, number, answer, waiting, now):
            if calls.get(call_id) is not None:
                info = self.agent.membership.infos[message.sender]
                text = (
                    f"a call to {info} or its answer is lost: a connection broke, or there was no "
                    "memory for a large message. Whether the function has run is not known; call "
                    "it again only if it may run twice"
                )
                logger.error("%s: %s", self.agent.worker_info, text)
                self.agent.dispatcher.lost += 1
                calls.settle(call_id, RpcError(text))

    # -- what it is asked ----------------------------------------------------------------

    def _on_question(self, message: Message) -> None:
        number, body = self._read(message)
        question = read_question(body)
        if isinstance(question, str):
            answer = _HEAD.pack(number, 0, 1, 0) + self._dump_snapshot(question)
            self.agent.outbox.post(message.sender, Message(Kind.TELL, body=answer))
        elif number:
            told = where_calls_stand(self.agent, message.sender, question)
            if not len(self.agent.outbox):  # else some answers are unsent: it will ask again
                self._send_each_way(message.sender, Kind.TELL, number, told.dump())

    def _dump_snapshot(self, question: str) -> bytes:
        if question.endswith(NUMBERS):
            return take_snapshot(self.agent, (), 0).dump()
        notes = [self.explain(member).lstrip("; ") for member in self.rules.loaded()]
        return take_snapshot(self.agent, notes, _MAX_ENTRIES).dump()

    # -- both ----------------------------------------------------------------------------

    def _send_each_way(self, member: MemberId, kind: Kind, number: int, body: bytes) -> None:
        def first_frame(way: int, ways: int, sent: int) -> bytes:
            return Message(kind, body=_HEAD.pack(number, way, ways, sent) + body).first_frame()

        self.agent.completions.submit(partial(self.agent.outbox.post_each_way, member, first_frame))

    def _read(self, message: Message) -> tuple[int, bytes]:
        """Returns a question's number and what follows; 0 if it has not come by all ways yet.

        Raises:
            ProtocolError: the message is no question or answer.
        """
        body = bytes(message.body)
        try:
            number, way, ways, sent = _HEAD.unpack_from(body)
        except struct.error as error:
            raise ProtocolError(f"expected the number of a question: {error}") from error
        if way:
            self.agent.dispatcher.break_off(message.sender)
        if sent:
            self._compare_counts(message.sender, min(way, 1), sent)
        if not self.rules.is_complete(message.kind, message.sender, number, way, ways):
            number = 0
        return number, body[_HEAD.size :]

    def _compare_counts(self, sender: MemberId, way: int, sent: int) -> None:
        """Reports messages as lost if fewer have come by a way than were sent, twice."""
        short = sent - self.agent.dispatcher.received_from(sender, way)
        lost = self.rules.lost_messages(sender, way, short, time.monotonic())
        if lost:
            logger.error(
                "%s: messages from %s are lost (%d): a connection broke, or there was no memory",
                self.agent.worker_info,
                self.agent.membership.infos[sender],
                lost,
            )
            self.agent.dispatcher.count_missing(sender, way, lost)

    # -- visitors ------------------------------------------------------------------------

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
        if question.startswith(SELF):
            visitor.write(self._dump_snapshot(question))
        if not (question.startswith(OTHERS) and self._ask_other_hosts(visitor, question)):
            visitor.finish()

    def _ask_other_hosts(self, visitor: Visitor, question: str) -> bool:
        """Asks the members on other hosts; returns whether there are any."""
        membership = self.agent.membership
        members = {member for member in membership.living if not membership.shares_host(member)}
        members.discard(membership.own_id)
        self._visits = {n: visit for n, visit in self._visits.items() if not visit[0].closed}
        number = next(self.rules.numbers)
        if members:
            self._visits[number] = (visitor, members)
        for member in sorted(members):
            body = _HEAD.pack(number, 0, 1, 0) + dump_question(question)
            self.agent.outbox.post(member, Message(Kind.ASK, body=body))
        return bool(members)

    def _pass_on(self, number: int, sender: MemberId, answer: bytes) -> None:
        """Gives a visitor the answer of a member on another host."""
        visitor, members = self._visits[number]
        if sender in members:
            members.discard(sender)
            visitor.write(answer.replace(b"\n", b" "))
        if not members:
            del self._visits[number]
            visitor.finish()

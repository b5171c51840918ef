"""Plugs inspection into an agent: the questions what a worker does, and their answers.

A worker asks its callees where its slow calls stand (see `zrpc.services.inspection.questions`), and
warns of them. It answers its callers, and the visitors of its private socket, who may also ask what
the members on other hosts do.
"""

from __future__ import annotations

import contextlib
import logging
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from queue import Empty, Queue

from typing_extensions import override

from zrpc.agent.agent import Agent
from zrpc.agent.service import Handler, Service
from zrpc.errors import RpcError, expecting
from zrpc.runtime.thread_pool import HandlerPool
from zrpc.services.inspection.black_holes import BlackHoles
from zrpc.services.inspection.circles import WAITS, ActorCircles
from zrpc.services.inspection.collect import take_snapshot, where_calls_stand
from zrpc.services.inspection.listener import NUMBERS, SELF, Listener
from zrpc.services.inspection.questions import Questions, Standings, dump_question, read_question
from zrpc.services.inspection.stuck import StuckCalls
from zrpc.wire.kind import Kind
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message

logger = logging.getLogger(__name__)

# How many threads, calls, requests and jobs each a snapshot has: the thread that takes it receives
# nothing meanwhile.
_MAX_ENTRIES = 1000
# How long the members on other hosts may take for an answer to a visitor, and how often it is seen
# whether this worker has shut down meanwhile.
_VISIT_SECONDS = 10.0
_LOOK_SECONDS = 0.1

# With this a question and its answer begin: the question's number, the way, the number of ways, and
# how many messages went that way before.
_HEAD = struct.Struct("<QBBQ")
# A message of the kind WAITING has one of the bytes, and then the numbers of calls.
_DO_YOU_WAIT, _I_DO_NOT = b"?", b"!"
_CALL = struct.Struct("<Q")


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
        self._black_holes = BlackHoles(agent)
        limit = agent.options.warn_after
        self._stuck = StuckCalls(agent, limit, self.explain, self.rules.standing)
        self._checked_at = self._ran_at = time.monotonic()
        self._listener = self._open_listener()
        # Sends questions and answers. Not the thread that runs callbacks: these may compute.
        self._sender = HandlerPool(1, f"zrpc-{agent.worker_info.name}-questions", agent.context)
        self._circles = ActorCircles(agent, self._ask_waits)
        # The answers to each question of a visitor about other hosts, by its number.
        self._visits: dict[int, Queue[tuple[MemberId, bytes]]] = {}

    @override
    def handlers(self) -> Mapping[Kind, Handler]:
        return {
            Kind.ASK: self._on_question,
            Kind.TELL: self._on_answer,
            Kind.CIRCLE: self._circles.on_circle,
            Kind.WAITING: self._on_waiting,
        }

    @override
    def on_member_lost(self, member: MemberId) -> None:
        self.rules.forget(member)
        self._black_holes.forget(member)

    @override
    def on_messages_lost(self, member: MemberId) -> None:
        # They may be cancellations. Then the handlers go on for nobody, perhaps without end.
        requests = [each for each in self.agent.callee.requests.all() if each.sender == member]
        served = [each.call_id for each in requests if not each.scope.must_run]
        self._post_calls(member, _DO_YOU_WAIT, served)

    @override
    def explain(self, member: MemberId, call_id: int = 0) -> str:
        membership = self.agent.membership
        state = "is this worker" if member == membership.own_id else "is alive"
        if member in membership.lost:
            state = ""
        name = self.agent.callees.describe(member)
        text = self.rules.describe(member, call_id, name, state, time.monotonic())
        return "".join(f"; {each}" for each in (text, self._black_holes.explain(member)) if each)

    @override
    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self._black_holes.close()
        self._sender.close(self.agent.graceful_shutdown.timing.join)

    # -- what this worker asks -----------------------------------------------------------

    @override
    def tick(self) -> None:
        """Asks the callees of slow calls, answers visitors, and warns of calls."""
        now = time.monotonic()
        self._ask_callees(now)
        self._black_holes.look(self.rules.silent(now), now)
        # Alone: another handler may be what is asked about.
        self.agent.receiver.relieve(self._sender, alone=True)
        if self._listener is not None:
            self._listener.admit()
        self._stuck.check_calls(now)
        self._circles.look(now)

    def _ask_callees(self, now: float) -> None:
        self._check(now)
        awaited = self.agent.awaited_members() | self.rules.unchecked.keys()
        waiting: dict[MemberId, list[int]] = {member: [] for member in awaited}
        for call in self.agent.caller.calls.in_flight():
            if now - call.begun < self.rules.seconds:
                break  # those that follow are younger
            if call.left:
                waiting.setdefault(call.peer, []).append(call.call_id)
        for member in self.agent.membership.lost:
            waiting.pop(member, None)
        if len(self.agent.outbox):  # some of these calls may not have been sent after all
            return
        self.rules.ask_only(waiting, now)
        for member, call_ids in waiting.items():
            number, asked = self.rules.ask(member, call_ids, now)
            if number:
                self._send_each_way(member, Kind.ASK, number, dump_question(asked))

    def _check(self, now: float) -> None:
        """Notes which peers may lack messages for which nothing waits; see `Questions.check`."""
        since, every = self._checked_at, self.rules.check_seconds
        if self.agent.graceful_shutdown.asked:  # it may wait for one; most are over before this
            since, every = max(since, self._ran_at), self.rules.seconds
        else:
            self._ran_at = now
        if now - since >= every:
            self._checked_at, membership = now, self.agent.membership
            others = [member for member in membership.living if member != membership.own_id]
            self.rules.check({member: self.agent.network.sent([member]) for member in others})

    def _on_answer(self, message: Message) -> None:
        number, body = self._read(message)
        if (visit := self._visits.get(number)) is not None:
            visit.put((message.sender, body))
        if not number or visit is not None or self._circles.take(number, body):
            return
        calls = self.agent.caller.calls
        answer, now = Standings.parse(body), time.monotonic()
        lost = self.rules.take_answer(message.sender, number, answer, now)
        if lost is None:
            return
        for call_id in lost:
            if calls.get(call_id) is not None:
                info = self.agent.membership.infos[message.sender]
                text = (
                    f"a call to {info} or its answer is lost: a connection broke, or there was no "
                    "memory for a large message. Whether the function has run is not known; call "
                    "it again only if it may run twice"
                )
                logger.error("%s: %s", self.agent.worker_info, text)
                self.agent.dispatcher.lost += 1
                if (call := calls.settle(call_id, RpcError(text))) is not None:
                    self.agent.callees.tell_cancelled(call)  # it may keep what was in the answer
        self.agent.on_answered(message.sender)

    # -- what it is asked ----------------------------------------------------------------

    def _on_question(self, message: Message) -> None:
        number, body = self._read(message)
        question = read_question(body) if number else ()
        if isinstance(question, str):
            self._post(message.sender, Kind.TELL, number, self._dump_snapshot(question))
        elif number:
            told = where_calls_stand(self.agent, message.sender, question)
            # Afterwards: what is missing may have just been answered. The caller asks again if some
            # answers are unsent.
            if not len(self.agent.outbox):
                self._send_each_way(message.sender, Kind.TELL, number, told.dump())

    def _on_waiting(self, message: Message) -> None:
        body = bytes(message.body)
        with expecting("the numbers of calls"):
            calls = [call_id for (call_id,) in _CALL.iter_unpack(body[1:])]
        if body[:1] == _DO_YOU_WAIT:
            get = self.agent.caller.calls.get
            ended = [call_id for call_id in calls if get(call_id) is None]
            self._post_calls(message.sender, _I_DO_NOT, ended)
            return
        requests = self.agent.callee.requests
        for call_id in calls:
            # Not as a cancellation, which says that the caller has never got an answer: if there is
            # one, it was sent meanwhile.
            if requests.get(message.sender, call_id) is not None:
                requests.cancel(message.sender, call_id)

    def _post_calls(self, member: MemberId, what: bytes, calls: Sequence[int]) -> None:
        if calls:
            body = what + b"".join(map(_CALL.pack, calls))
            self.agent.outbox.post(member, Message(Kind.WAITING, body=body))

    def _ask_waits(self, member: MemberId) -> int:
        """Asks a member what waits there, and for what; returns the number of the question."""
        number = next(self.rules.numbers)
        self._post(member, Kind.ASK, number, dump_question(WAITS))
        return number

    def _dump_snapshot(self, question: str) -> bytes:
        if question == WAITS:
            return take_snapshot(self.agent, _MAX_ENTRIES).without_frames().dump()
        return take_snapshot(self.agent, 0 if question.endswith(NUMBERS) else _MAX_ENTRIES).dump()

    # -- both ----------------------------------------------------------------------------

    def _send_each_way(self, member: MemberId, kind: Kind, number: int, body: bytes) -> None:
        def first_frame(way: int, ways: int, sent: int) -> bytes:
            return Message(kind, body=_HEAD.pack(number, way, ways, sent) + body).first_frame()

        self._sender.submit(partial(self.agent.outbox.post_each_way, member, first_frame))

    def _post(self, member: MemberId, kind: Kind, number: int, body: bytes) -> None:
        """Sends a question or an answer by one way, when no order matters."""
        self.agent.outbox.post(member, Message(kind, body=_HEAD.pack(number, 0, 1, 0) + body))

    def _read(self, message: Message) -> tuple[int, bytes]:
        """Returns a question's number and what follows; 0 if it has not come by all ways yet.

        Raises:
            ProtocolError: the message is no question or answer.
        """
        body = bytes(message.body)
        with expecting("the number of a question"):
            number, way, ways, sent = _HEAD.unpack_from(body)
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
            name = f"zrpc-{self.agent.worker_info.name}-inspection"
            return Listener(Path(directory), self.agent.context, name, self._answer_visitor)
        except OSError as error:
            logger.warning("zrpc stacks can't ask %s: %s", self.agent.worker_info, error)
            return None

    def _answer_visitor(self, question: str) -> Iterator[bytes]:
        """Yields the answer to a visitor's question, in a thread of its own."""
        if question.startswith(SELF):
            yield self._dump_snapshot(question)
            return
        membership = self.agent.membership
        members = {member for member in membership.living if not membership.shares_host(member)}
        members.discard(membership.own_id)
        number, answers = next(self.rules.numbers), Queue[tuple[MemberId, bytes]]()
        self._visits[number] = answers
        try:
            for member in sorted(members):
                self._post(member, Kind.ASK, number, dump_question(question))
            end = time.monotonic() + _VISIT_SECONDS
            while members and time.monotonic() < end and not self.agent.closed:
                with contextlib.suppress(Empty):
                    member, answer = answers.get(timeout=_LOOK_SECONDS)
                    if member in members:
                        members.discard(member)
                        yield answer.replace(b"\n", b" ")
        finally:  # also if the visitor leaves
            del self._visits[number]

"""Loss detection: a worker asks its callees which of its outstanding calls they have.

When a connection breaks, some of what was sent over it is lost. ZeroMQ reconnects, sends what it
had not begun to send, and tells neither side what is missing. So a worker asks each callee, every
second, about the calls that have waited for that long (ROLL_CALL). The callee answers with the
calls that it does not have (MISSING). They were answered meanwhile, or they or their answers are
lost; a call that is lost fails.

The order of messages tells which of the two it is. The question goes by each way that calls go,
behind them, and its answer by each way that answers go. When the answer has come by all ways,
nothing that was sent before is still in flight. The one exception is what was read from a
connection before it broke: it may come after what came by the next connection. So a call is lost
when it is missing twice.

Questions and answers also say how many messages their sender has sent by the same way. If fewer
have come, twice, the others are lost, calls or not. Services that wait for messages other than
answers are told, and have the peer asked as callees are.
"""

from __future__ import annotations

import itertools
import logging
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from typing_extensions import override

from zrpc.agent.agent import Agent
from zrpc.agent.service import Handler, Service
from zrpc.errors import ProtocolError, RpcError
from zrpc.wire.kind import Kind
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message

__all__ = ["LossDetectionTiming", "LossDetector"]

logger = logging.getLogger(__name__)

# A question names no more calls than this: the oldest.
_MAX_CALLS_PER_QUESTION = 1024

# The question's number, the way by which it goes, the number of ways, and how many messages went
# that way before.
_HEAD = struct.Struct("<QBBQ")
_CALL_ID = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class LossDetectionTiming:
    """When callees are asked, in seconds.

    Attributes:
        question_seconds: how often a callee is asked, and the age from which calls are asked about.
        patience_seconds: how long the first answer is waited for before the question is repeated: a
            large message may be ahead of the question, or the question may be lost.
    """

    question_seconds: float = 1.0
    patience_seconds: float = 2.0


# What each new detector goes by.
TIMING = LossDetectionTiming()


class LossDetector(Service):
    """Fails calls whose request or answer is lost, and reports other lost messages.

    All of it is done in the I/O thread, except for sending, since another thread may be copying a
    large message into the mailbox.

    Attributes:
        timing: when callees are asked; it may be replaced at any time.
    """

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self.timing = TIMING
        self._checked_at = float("-inf")
        self._numbers = itertools.count(1)
        self._asked: dict[MemberId, _Question] = {}
        # How many messages are missing, by sender and way, and since when.
        self._short: dict[tuple[MemberId, int], tuple[int, float]] = {}
        # The number of each peer's latest question and answer, and the ways by which it has come.
        self._copies: dict[tuple[int, MemberId], tuple[int, set[int]]] = {}

    @override
    def handlers(self) -> Mapping[Kind, Handler]:
        return {Kind.ROLL_CALL: self._on_roll_call, Kind.MISSING: self._on_missing}

    @override
    def on_member_lost(self, member: MemberId) -> None:
        """Forgets a peer; the calls to it have failed."""
        self._asked.pop(member, None)
        for kind in (Kind.ROLL_CALL, Kind.MISSING):
            self._copies.pop((kind, member), None)
        for way in range(2):
            self._short.pop((member, way), None)

    # -- the caller ----------------------------------------------------------------------

    @override
    def tick(self) -> None:
        """Asks the callees of calls that have waited for long."""
        now = time.monotonic()
        least_age = self.timing.question_seconds
        if now - self._checked_at < least_age:
            return
        self._checked_at = now
        waiting: dict[MemberId, list[int]] = {member: [] for member in self.agent.awaited_members()}
        for call in self.agent.caller.calls.in_flight():
            if now - call.begun < least_age:
                break  # those that follow are younger
            if call.left:
                waiting.setdefault(call.peer, []).append(call.call_id)
        for member in (self.agent.membership.own_id, *self.agent.membership.lost):
            waiting.pop(member, None)
        if len(self.agent.outbox):  # some of these calls may not have been sent after all
            return
        self._asked = {member: asked for member, asked in self._asked.items() if member in waiting}
        for member, call_ids in waiting.items():
            self._ask(member, call_ids[:_MAX_CALLS_PER_QUESTION], now)

    def _ask(self, member: MemberId, call_ids: list[int], now: float) -> None:
        asked = self._asked.get(member) or _Question()
        if now < asked.patient_until:
            return
        # Longer each time, so that an answer comes in time, however slow the network.
        asked.patience = 2 * asked.patience if asked.number else self.timing.patience_seconds
        asked.number, asked.patient_until = next(self._numbers), now + asked.patience
        self._asked[member] = asked
        self._send(member, Kind.ROLL_CALL, asked.number, call_ids)

    def _on_missing(self, message: Message) -> None:
        number, missing = self._read(message)
        asked = self._asked.get(message.sender)
        if not number or asked is None or number != asked.number:
            return
        # Not again at once: what is missing has some time to arrive after all.
        asked.number = 0
        asked.patient_until = time.monotonic() + self.timing.question_seconds / 2
        calls = self.agent.caller.calls
        before, asked.missing = asked.missing, {i for i in missing if calls.get(i) is not None}
        for call_id in sorted(before & asked.missing):
            call = calls.pop(call_id)
            if call is not None:
                info = self.agent.membership.infos[message.sender]
                text = (
                    f"a call to {info} or its answer is lost: a connection broke, or there was no "
                    "memory for a large message. Whether the function has run is not known; call "
                    "it again only if it may run twice"
                )
                logger.error("%s: %s", self.agent.worker_info, text)
                self.agent.dispatcher.lost += 1
                call.settle(RpcError(text))

    # -- the callee ----------------------------------------------------------------------

    def _on_roll_call(self, message: Message) -> None:
        number, call_ids = self._read(message)
        if not number:
            return
        requests = self.agent.callee.requests
        missing = [each for each in call_ids if not requests.has(message.sender, each)]
        if not len(self.agent.outbox):  # else some answers are unsent: the caller will ask again
            self._send(message.sender, Kind.MISSING, number, missing)

    # -- both ----------------------------------------------------------------------------

    def _send(self, member: MemberId, kind: Kind, number: int, call_ids: list[int]) -> None:
        tail = b"".join(map(_CALL_ID.pack, call_ids))

        def first_frame(way: int, ways: int, sent: int) -> bytes:
            return Message(kind, body=_HEAD.pack(number, way, ways, sent) + tail).first_frame()

        self.agent.completions.submit(partial(self.agent.outbox.post_each_way, member, first_frame))

    def _read(self, message: Message) -> tuple[int, list[int]]:
        """Returns a question's number and its calls; 0 if it has not come by all ways yet.

        Raises:
            ProtocolError: the message is no question or answer.
        """
        body = bytes(message.body)
        try:
            number, way, ways, sent = _HEAD.unpack_from(body)
            call_ids = [each for (each,) in _CALL_ID.iter_unpack(body[_HEAD.size :])]
        except struct.error as error:
            raise ProtocolError(f"expected the numbers of calls: {error}") from error
        if way:
            self.agent.dispatcher.break_off(message.sender)
        self._compare_counts(message.sender, min(way, 1), sent, time.monotonic())
        latest, seen = self._copies.get((message.kind, message.sender), (0, set()))
        if number > latest:
            seen = set()
            self._copies[message.kind, message.sender] = number, seen
        elif number < latest or way in seen:
            return 0, call_ids
        seen.add(way)
        return (number if len(seen) == ways else 0), call_ids

    def _compare_counts(self, sender: MemberId, way: int, sent: int, now: float) -> None:
        """Reports messages as lost if fewer have come by a way than were sent, twice."""
        short = sent - self.agent.dispatcher.received_from(sender, way)
        before, since = self._short.get((sender, way), (0, now))
        lost = min(short, before)
        if lost <= 0:
            self._short[sender, way] = short, now
            return
        if now - since < self.timing.question_seconds / 2:
            self._short[sender, way] = lost, since
            return
        self._short[sender, way] = short - lost, now
        logger.error(
            "%s: messages from %s are lost (%d): a connection broke, or there was no memory",
            self.agent.worker_info,
            self.agent.membership.infos[sender],
            lost,
        )
        self.agent.dispatcher.count_missing(sender, way, lost)


@dataclass(slots=True)
class _Question:
    """The latest question to a callee.

    Attributes:
        number: its number; 0 once it is answered.
        patience: how long its answer is waited for, in seconds.
        patient_until: nothing is asked before this time.
        missing: the calls that the callee did not have when it last answered.
    """

    number: int = 0
    patience: float = 0.0
    patient_until: float = 0.0
    missing: set[int] = field(default_factory=set)

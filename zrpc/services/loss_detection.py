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

import logging
import struct
import time
from collections.abc import Mapping
from functools import partial

from typing_extensions import override

from zrpc.agent.agent import Agent
from zrpc.agent.service import Handler, Service
from zrpc.errors import ProtocolError, RpcError
from zrpc.services.loss_rules import LossDetectionTiming, LossRules
from zrpc.wire.kind import Kind
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message

__all__ = ["LossDetectionTiming", "LossDetector"]

logger = logging.getLogger(__name__)

# A question names no more calls than this: the oldest.
_MAX_CALLS_PER_QUESTION = 1024

# The question's number, its way, the number of ways, and how many messages went
# that way before.
_HEAD = struct.Struct("<QBBQ")
_CALL_ID = struct.Struct("<Q")


# What each new detector goes by.
TIMING = LossDetectionTiming()


class LossDetector(Service):
    """Fails calls whose request or answer is lost, and reports other lost messages.

    All of it is done in the I/O thread, except for sending, since another thread may be copying a
    large message into the mailbox.

    Attributes:
        rules: what is asked, and what answers mean; its timing may be replaced at any time.
    """

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self.rules = LossRules(TIMING)
        self._checked_at = float("-inf")

    @override
    def handlers(self) -> Mapping[Kind, Handler]:
        return {Kind.ROLL_CALL: self._on_roll_call, Kind.MISSING: self._on_missing}

    @override
    def on_member_lost(self, member: MemberId) -> None:
        """Forgets a peer; the calls to it have failed."""
        self.rules.forget(member)

    # -- the caller ----------------------------------------------------------------------

    @override
    def tick(self) -> None:
        """Asks the callees of slow calls."""
        now = time.monotonic()
        least_age = self.rules.timing.question_seconds
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
        self.rules.ask_only(waiting)
        for member, call_ids in waiting.items():
            if number := self.rules.ask(member, now):
                self._send(member, Kind.ROLL_CALL, number, call_ids[:_MAX_CALLS_PER_QUESTION])

    def _on_missing(self, message: Message) -> None:
        number, missing = self._read(message)
        calls = self.agent.caller.calls
        known = {call_id for call_id in missing if calls.get(call_id) is not None}
        for call_id in self.rules.lost_calls(message.sender, number, known, time.monotonic()):
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
        self._compare_counts(message.sender, min(way, 1), sent)
        if not self.rules.is_complete(message.kind, message.sender, number, way, ways):
            number = 0
        return number, call_ids

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

"""Calls that are lost on their way: a worker asks after those that it waits for.

When a connection breaks, some of what was sent by it is lost. ZeroMQ connects anew, sends what it
had not begun to send, and tells neither side what is missing. So a worker asks each callee, every
second, after the calls that have waited for as long (ROLL_CALL), and hears which of them the callee
does not have (MISSING). These were answered meanwhile, or are lost, on their way there or back;
whoever waits for one is told so.

Which of the two it is follows from the order of messages. The question goes by each way that calls
go, behind them, and its answer by each way that answers go: when it is there by all, nothing is
left of what was sent before. Only what was read from a connection before it broke may come after
what came by the next. So a call is lost when it is missing twice.

Both words also say how many messages the sender has sent by the same way. Where fewer have come,
twice, the others are lost, calls or not: layers that wait for such are told, and have the peer
asked as callees are.
"""

from __future__ import annotations

import itertools
import logging
import struct
import time
from functools import partial

from zrpc.agent import Agent
from zrpc.errors import ProtocolError, RpcError
from zrpc.wire.header import Message
from zrpc.wire.kind import Kind

__all__ = ["RollCallLayer", "plug_in"]

logger = logging.getLogger(__name__)

# How often a callee is asked, in seconds, and from which age of a call on.
_EVERY = 1.0
# After so many seconds without an answer it is asked again, at first: a large message may be before
# the question, or the question may be lost.
_PATIENCE = 2.0
# No more calls are asked after at once: the oldest.
_MOST = 1024

# The question's number, by which way it goes, by how many, and how many messages went before.
_HEAD = struct.Struct("<QBBQ")
_CALL_ID = struct.Struct("<Q")


class RollCallLayer:
    """Plugs the roll call into an agent.

    Args:
        agent: the agent; this layer registers its handlers there.

    All that follows is done in the I/O thread; but not the sending, since another thread may be
    copying a large message into the mailbox.
    """

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.every = _EVERY
        self._next = 0.0
        self._numbers = itertools.count(1)
        self._asked: dict[int, _Question] = {}
        # How many messages are missing, by sender and way, and since when.
        self._short: dict[tuple[int, int], tuple[int, float]] = {}
        self._copies = {kind: _Copies() for kind in (Kind.ROLL_CALL, Kind.MISSING)}
        agent.dispatcher.register(Kind.ROLL_CALL, self._on_roll_call)
        agent.dispatcher.register(Kind.MISSING, self._on_missing)
        agent.tickers.append(self._tick)

    def lose(self, rank: int) -> None:
        """A peer is gone, and the calls to it have failed."""
        self._asked.pop(rank, None)
        for copies in self._copies.values():
            copies.forget(rank)
        for way in range(2):
            self._short.pop((rank, way), None)

    def quiet(self) -> bool:
        """Nobody waits for what is done here."""
        return True

    def close(self) -> None:
        """Nothing is left to do."""

    # -- the caller ----------------------------------------------------------------------

    def _tick(self) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self.every
        waiting: dict[int, list[int]] = {
            rank: [] for awaited in self.agent.awaited for rank in awaited()
        }
        for call in self.agent.caller.calls.under_way():
            if now - call.begun < self.every:
                break  # those that follow are younger
            if call.left:
                waiting.setdefault(call.peer, []).append(call.call_id)
        for rank in (self.agent.membership.rank, *self.agent.membership.lost):
            waiting.pop(rank, None)
        if len(self.agent.outbox):  # some of them may not have left after all
            return
        self._asked = {rank: asked for rank, asked in self._asked.items() if rank in waiting}
        for rank, call_ids in waiting.items():
            self._ask(rank, call_ids[:_MOST], now)

    def _ask(self, rank: int, call_ids: list[int], now: float) -> None:
        asked = self._asked.get(rank) or _Question()
        if now < asked.patient_until:
            return
        # Longer each time, so that an answer comes in time, however slow the network.
        asked.patience = 2 * asked.patience if asked.number else _PATIENCE
        asked.number, asked.patient_until = next(self._numbers), now + asked.patience
        self._asked[rank] = asked
        self._send(rank, Kind.ROLL_CALL, asked.number, call_ids)

    def _on_missing(self, message: Message) -> None:
        number, missing = self._read(message)
        asked = self._asked.get(message.sender)
        if not number or asked is None or number != asked.number:
            return
        # Not again at once: what is missing has some time to come after all.
        asked.number, asked.patient_until = 0, time.monotonic() + self.every / 2
        calls = self.agent.caller.calls
        before, asked.missing = asked.missing, {i for i in missing if calls.get(i) is not None}
        for call_id in sorted(before & asked.missing):
            call = calls.pop(call_id)
            if call is not None:
                info = self.agent.membership.infos[message.sender]
                text = (
                    f"a call to {info} or its answer is lost: a connection broke, or there was no "
                    "memory for a large message. Whether the function has run is not known; call "
                    "it again only where it may run twice"
                )
                logger.error("%s: %s", self.agent.worker_info, text)
                call.settle(RpcError(text))

    # -- the callee ----------------------------------------------------------------------

    def _on_roll_call(self, message: Message) -> None:
        number, call_ids = self._read(message)
        if not number:
            return
        requests = self.agent.callee.requests
        missing = [each for each in call_ids if not requests.has(message.sender, each)]
        if not len(self.agent.outbox):  # else some answers are here, and will be asked after again
            self._send(message.sender, Kind.MISSING, number, missing)

    # -- both ----------------------------------------------------------------------------

    def _send(self, rank: int, kind: Kind, number: int, call_ids: list[int]) -> None:
        tail = b"".join(map(_CALL_ID.pack, call_ids))

        def first_frame(way: int, ways: int, sent: int) -> bytes:
            return Message(kind, body=_HEAD.pack(number, way, ways, sent) + tail).first_frame()

        self.agent.submit(partial(self.agent.outbox.post_each_way, rank, first_frame))

    def _read(self, message: Message) -> tuple[int, list[int]]:
        """The number of a question and what is said; 0 where it has not come by all ways.

        Raises:
            ProtocolError: it is none.
        """
        body = bytes(message.body)
        try:
            number, way, ways, sent = _HEAD.unpack_from(body)
            call_ids = [each for (each,) in _CALL_ID.iter_unpack(body[_HEAD.size :])]
        except struct.error as error:
            raise ProtocolError(f"expected the numbers of calls: {error}") from error
        if way:
            self.agent.dispatcher.break_off(message.sender)
        self._compare(message.sender, min(way, 1), sent, time.monotonic())
        complete = self._copies[Kind(message.kind)].note(message.sender, number, way, ways)
        return (number if complete else 0), call_ids

    def _compare(self, sender: int, way: int, sent: int, now: float) -> None:
        """Finds out whether fewer messages have come by a way than were sent."""
        short = sent - self.agent.dispatcher.received_from(sender, way)
        before, since = self._short.get((sender, way), (0, now))
        lost = min(short, before)
        if lost <= 0:
            self._short[sender, way] = short, now
            return
        if now - since < self.every / 2:
            self._short[sender, way] = lost, since
            return
        self._short[sender, way] = short - lost, now
        logger.error(
            "%s: messages of %s are lost (%d): a connection broke, or there was no memory",
            self.agent.worker_info,
            self.agent.membership.infos[sender],
            lost,
        )
        self.agent.dispatcher.miss(sender, way, lost)


class _Question:
    """What a callee was asked, the last time.

    Attributes:
        number: of the question; 0 where it is answered.
        patience: for how long its answer is waited for, in seconds.
        patient_until: until when nothing is asked.
        missing: the calls that the callee did not have, when it last answered.
    """

    def __init__(self) -> None:
        self.number = 0
        self.patience = _PATIENCE
        self.patient_until = 0.0
        self.missing: set[int] = set()


class _Copies:
    """By which ways each peer's latest message has come."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, set[int]]] = {}

    def note(self, sender: int, number: int, way: int, ways: int) -> bool:
        """One has come; whether that makes it complete."""
        latest, seen = self._seen.get(sender, (0, set()))
        if number > latest:
            self._seen[sender] = number, seen = number, set()
        elif number < latest or way in seen:
            return False
        seen.add(way)
        return len(seen) == ways

    def forget(self, sender: int) -> None:
        """A peer is gone."""
        self._seen.pop(sender, None)


def plug_in(agent: Agent) -> RollCallLayer:
    """Plugs the roll call into an agent, see `join_mesh`."""
    return RollCallLayer(agent)

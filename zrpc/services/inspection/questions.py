"""What a worker asks its callees, and what it concludes from answers and counts. No I/O here.

A worker asks each callee, every second, about the calls that have waited for that long. The callee
says where each of them stands: whether it is queued, behind what, whether it runs, and what it
waits for. That is told in errors of time-outs. A call that the callee does not have was answered
meanwhile, or it or its answer is lost: when a connection breaks, ZeroMQ tells neither side what is
missing of what was sent over it. A call that is lost fails.

The order of messages tells which of the two it is. The question goes by each way that calls go,
behind them, and its answer by each way that answers go. When the answer has come by all ways,
nothing that was sent before is still in flight. The one exception is what was read from a
connection before it broke: it may come after what came by the next connection. So a call is lost
when it is missing twice.

Questions and answers also say how many messages their sender has sent by the same way. If fewer
have come, twice, the others are lost, calls or not. Services that wait for messages other than
answers are told, and have the peer asked as callees are. Nobody waits for some messages, such as
the end of an RRef, but if one is lost, its receiver keeps something for good. So now and then a
worker also asks the peers to which it has sent anything since; and all of them while a graceful
shutdown takes long.

All times are in seconds, on one clock that does not go back.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from typing_extensions import Buffer

from zrpc.agent.service import LOST_AFTER_ANSWERS
from zrpc.errors import ProtocolError, expecting
from zrpc.wire.kind import Kind
from zrpc.wire.member_id import MemberId

# A question names no more calls than this: the oldest.
_MAX_CALLS = 1024
_MAX_BYTES = 1 << 18
_MAX_TEXT = 300
# How long an answer is taken to describe the present.
_FRESH_SECONDS = 3.0
# A question that has no answer is repeated after this time at the latest: it may be lost. The
# answers to this many of the latest questions count: a large message may be ahead of them.
_MAX_PATIENCE_SECONDS = 8.0
_MAX_UNANSWERED = 8
# A peer is silent that has not answered for this time.
_SILENT_SECONDS = 3.0
# Where a call stands that the callee does not have.
_MISSING = "unknown: it was answered meanwhile, or is lost"


def dump_question(question: Sequence[int] | str) -> bytes:
    """Returns what `read_question` reads."""
    return json.dumps(question).encode()


def read_question(body: Buffer) -> list[int] | str:
    """Reads a question: about some of the sender's calls, or about all that this worker does.

    Raises:
        ProtocolError: it is something else.
    """
    question = _load(body)
    if isinstance(question, str):
        return question
    if isinstance(question, list) and all(type(each) is int for each in question[:_MAX_CALLS]):
        return question[:_MAX_CALLS]
    raise ProtocolError(f"expected the numbers of calls, found {str(question)[:_MAX_TEXT]}")


def _load(body: Buffer) -> Any:
    data = bytes(body)
    if len(data) > _MAX_BYTES:
        raise ProtocolError(f"expected at most {_MAX_BYTES} bytes about calls, found {len(data)}")
    with expecting("something about calls"):
        return json.loads(data)


class Standings(NamedTuple):
    """What a callee says of the calls that it was asked about.

    Attributes:
        calls: those that it has, by number, and where each stands; empty for all but the oldest.
        load: whether its requests have to wait, and why; empty if they don't.
    """

    calls: Mapping[int, str]
    load: str = ""

    def about(self, call: int) -> str:
        """Returns what it says of the callee and of one call, as a sentence; empty if nothing."""
        standing = self.calls.get(call)
        return "; ".join(filter(None, (self.load, standing and f"this call is {standing}")))

    def dump(self) -> bytes:
        """Returns the answer as the body of a message."""
        calls = {each: text[:_MAX_TEXT] for each, text in self.calls.items()}
        content = {"calls": calls, "load": self.load}
        return json.dumps(content, ensure_ascii=False).encode(errors="surrogatepass")

    @classmethod
    @expecting("where calls stand")
    def parse(cls, body: Buffer) -> Standings:
        """Reads what `dump` wrote.

        Raises:
            ProtocolError: the body is something else.
        """
        content = _load(body)
        calls = {int(each): str(text)[:_MAX_TEXT] for each, text in content["calls"].items()}
        return cls(calls, str(content["load"])[:_MAX_TEXT])


_NOTHING = Standings({})


@dataclass(slots=True)
class _Question:
    """The latest questions to a callee.

    Attributes:
        unanswered: the calls that they name, by the numbers of the questions since the last answer.
        asked_at: when the first one was sent that has no answer.
        patience: how long an answer is waited for.
        patient_until: nothing is asked before this time.
        missing: the calls that the callee did not have when it last answered.
        answer: its latest answer, with what was missing.
        answered_at: when that came.
    """

    unanswered: dict[int, Sequence[int]] = field(default_factory=dict)
    asked_at: float = 0.0
    patience: float = 0.0
    patient_until: float = 0.0
    missing: set[int] = field(default_factory=set)
    answer: Standings = _NOTHING
    answered_at: float = 0.0

    @property
    def kept_until(self) -> float:
        """Until when it is kept if nothing waits for its answer."""
        return self.asked_at + _FRESH_SECONDS if self.unanswered else self.patient_until


class Questions:
    """The questions of one worker, and what its peers have answered.

    For one thread at a time, except for `describe`, which any thread may call.

    Attributes:
        seconds: how often a callee is asked, and the age from which calls are asked about.
        check_seconds: how often it is seen to which peers anything was sent. If 64 workers all call
            each other, each sends six questions a second for that.
        numbers: of questions.
        unchecked: how often the peers must still answer that may lack messages, see `check`.
    """

    seconds = 1.0
    check_seconds = 30.0

    def __init__(self) -> None:
        self.numbers = itertools.count(1)
        self.unchecked: dict[MemberId, int] = {}
        self._checked: dict[MemberId, int] = {}  # how many messages each had been sent by then
        self._questions: dict[MemberId, _Question] = {}
        # How many messages are missing, by sender and way, and since when.
        self._short: dict[tuple[MemberId, int], tuple[int, float]] = {}
        # The numbers of each peer's latest questions and answers, and the ways on which they came.
        self._copies: dict[tuple[int, MemberId], dict[int, set[int]]] = {}

    def forget(self, member: MemberId) -> None:
        """Drops what is known of a peer that is gone."""
        self._questions.pop(member, None)
        self.unchecked.pop(member, None)
        self._checked.pop(member, None)
        for kind in (Kind.ASK, Kind.TELL):
            self._copies.pop((kind, member), None)
        for way in range(2):
            self._short.pop((member, way), None)

    def check(self, sent: Mapping[MemberId, int]) -> None:
        """Notes the peers that were sent messages since the last check: any of these may be lost.

        Args:
            sent: how many messages each peer was ever sent.
        """
        changed = sent.items() - self._checked.items()
        self.unchecked |= {member: LOST_AFTER_ANSWERS for member, count in changed if count}
        self._checked.update(changed)

    def ask_only(self, members: Collection[MemberId], now: float) -> None:
        """Drops the questions to other peers, since nothing waits for them, once they are old.

        Else the patience with a peer that was silent would delay the next question to it.
        """
        self._questions = {
            m: q for m, q in self._questions.items() if m in members or now < q.kept_until
        }

    def ask(self, member: MemberId, calls: Sequence[int], now: float) -> tuple[int, Sequence[int]]:
        """Returns the number of a question to send to a peer, and its calls; 0 if none is due."""
        asked = self._questions.setdefault(member, _Question())
        if now < asked.patient_until:
            return 0, ()
        # Longer each time: a slow network needs no more questions ahead of the answers.
        asked.patience = min(
            2 * (asked.patience if asked.unanswered else self.seconds), _MAX_PATIENCE_SECONDS
        )
        if not asked.unanswered:
            asked.asked_at = now
        number, asked.patient_until = next(self.numbers), now + asked.patience
        asked.unanswered[number] = calls[:_MAX_CALLS]
        if len(asked.unanswered) > _MAX_UNANSWERED:
            del asked.unanswered[min(asked.unanswered)]
        return number, asked.unanswered[number]

    def silent(self, now: float) -> set[MemberId]:
        """Returns the peers that have not answered for some seconds."""
        return {
            member
            for member, asked in self._questions.items()
            if asked.unanswered and now - asked.asked_at >= _SILENT_SECONDS
        }

    def take_answer(
        self, member: MemberId, number: int, answer: Standings, now: float
    ) -> Collection[int] | None:
        """Takes the answer to a question; returns the calls that are lost if none has an outcome.

        None if the answer does not count.

        Args:
            member: the callee.
            number: of the question; 0, or that of one before the last answer, does not count.
            answer: where the calls stand.
            now: the time.
        """
        asked = self._questions.get(member)
        if asked is None or number not in asked.unanswered:
            return None
        calls = asked.unanswered[number]
        # Not again at once: what is missing has some time to arrive after all. So the answers to
        # the other questions, which may be right behind, don't count.
        asked.unanswered.clear()
        asked.patient_until = now + self.seconds
        standing = {each: answer.calls.get(each, _MISSING) for each in calls}
        asked.answer, asked.answered_at = answer._replace(calls=standing), now
        if member in self.unchecked:
            self.unchecked[member] -= 1
            if not self.unchecked[member]:
                del self.unchecked[member]
        before, asked.missing = asked.missing, standing.keys() - answer.calls.keys()
        return sorted(before & asked.missing)

    def standing(self, member: MemberId, call: int) -> str:
        """Returns where a call stands at its callee: "queued ..."; empty if that is not known."""
        asked = self._questions.get(member)
        return asked.answer.calls.get(call, "") if asked is not None else ""

    def describe(self, member: MemberId, call: int, name: str, state: str, now: float) -> str:
        """Returns what a peer last said of itself and of a call, as a sentence; empty if nothing.

        Args:
            member: the peer.
            call: the number of the call; 0 for none.
            name: of the peer.
            state: what to say of it: "is alive"; empty if it is lost.
            now: the time.
        """
        asked = self._questions.get(member)
        if asked is None:
            return ""
        text, age = asked.answer.about(call), now - asked.answered_at
        if text and age < _FRESH_SECONDS:
            return f"{name} {state}: {text}" if state else f"shortly before, {text}"
        if text and state:
            return f"{age:.0f} s ago {name} said that {text}"
        silence = now - asked.asked_at if asked.unanswered else 0.0
        if silence < self.seconds or not state:
            return ""
        return (
            f"{name} was asked {silence:.1f} s ago where calls to it stand, and has not answered "
            "yet: it may be stopped, a C function may hold its interpreter's lock, or the network "
            "may be slow"
        )

    def is_complete(self, kind: int, sender: MemberId, number: int, way: int, ways: int) -> bool:
        """Whether a question or an answer has now come by all ways; true once, if by several."""
        if ways == 1:
            return True
        copies = self._copies.setdefault((kind, sender), {})
        seen = copies.setdefault(number, set())
        if way in seen:
            return False
        seen.add(way)
        if len(copies) > _MAX_UNANSWERED:
            del copies[min(copies)]
        return len(seen) == ways

    def lost_messages(self, sender: MemberId, way: int, short: int, now: float) -> int:
        """Returns how many messages are lost if ``short`` of those sent by a way have not come.

        Those are lost that were also missing half of the time between two questions ago.
        """
        before, since = self._short.get((sender, way), (0, now))
        lost = min(short, before)
        if lost <= 0:
            self._short[sender, way] = short, now
            return 0
        if now - since < self.seconds / 2:
            self._short[sender, way] = lost, since
            return 0
        self._short[sender, way] = short - lost, now
        return lost

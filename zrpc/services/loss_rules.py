"""What a worker asks its callees, and what it concludes from answers and counts. No I/O here.

See `zrpc.services.loss_detection`, which sends and receives. All times are in seconds, on one clock
that does not go back.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass, field

from zrpc.wire.kind import Kind
from zrpc.wire.member_id import MemberId

__all__ = ["LossDetectionTiming", "LossRules"]


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


@dataclass(slots=True)
class _Question:
    """The latest question to a callee.

    Attributes:
        number: its number; 0 once it is answered.
        patience: how long its answer is waited for.
        patient_until: nothing is asked before this time.
        missing: the calls that the callee did not have when it last answered.
    """

    number: int = 0
    patience: float = 0.0
    patient_until: float = 0.0
    missing: set[int] = field(default_factory=set)


class LossRules:
    """The questions of one worker, and what its peers have answered. For one thread at a time."""

    def __init__(self, timing: LossDetectionTiming) -> None:
        self.timing = timing
        self._numbers = itertools.count(1)
        self._questions: dict[MemberId, _Question] = {}
        # How many messages are missing, by sender and way, and since when.
        self._short: dict[tuple[MemberId, int], tuple[int, float]] = {}
        # The number of each peer's latest question and answer, and the ways on which it has come.
        self._copies: dict[tuple[int, MemberId], tuple[int, set[int]]] = {}

    def forget(self, member: MemberId) -> None:
        """Drops what is known of a peer that is gone."""
        self._questions.pop(member, None)
        for kind in (Kind.ROLL_CALL, Kind.MISSING):
            self._copies.pop((kind, member), None)
        for way in range(2):
            self._short.pop((member, way), None)

    def ask_only(self, members: Collection[MemberId]) -> None:
        """Drops the questions to peers for which nothing waits any longer."""
        self._questions = {m: asked for m, asked in self._questions.items() if m in members}

    def ask(self, member: MemberId, now: float) -> int:
        """Returns the number of a question to send to a peer; 0 if none is due."""
        asked = self._questions.setdefault(member, _Question())
        if now < asked.patient_until:
            return 0
        # Longer each time, so that an answer comes in time, however slow the network.
        asked.patience = 2 * asked.patience if asked.number else self.timing.patience_seconds
        asked.number, asked.patient_until = next(self._numbers), now + asked.patience
        return asked.number

    def lost_calls(
        self, member: MemberId, number: int, missing: set[int], now: float
    ) -> Collection[int]:
        """Takes the answer to a question; returns the calls that are lost.

        Args:
            member: the callee.
            number: of the question; 0, or that of another one than the latest, does not count.
            missing: the outstanding calls that the callee does not have.
            now: the time.
        """
        asked = self._questions.get(member)
        if not number or asked is None or number != asked.number:
            return ()
        # Not again at once: what is missing has some time to arrive after all.
        asked.number = 0
        asked.patient_until = now + self.timing.question_seconds / 2
        before, asked.missing = asked.missing, missing
        return sorted(before & missing)

    def is_complete(self, kind: int, sender: MemberId, number: int, way: int, ways: int) -> bool:
        """Whether a question or an answer has now come by all ways; true once for each number."""
        latest, seen = self._copies.get((kind, sender), (0, set()))
        if number > latest:
            seen = set()
            self._copies[kind, sender] = number, seen
        elif number < latest or way in seen:
            return False
        seen.add(way)
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
        if now - since < self.timing.question_seconds / 2:
            self._short[sender, way] = lost, since
            return 0
        self._short[sender, way] = short - lost, now
        return lost

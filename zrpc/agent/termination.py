"""Termination detection: the rules of a graceful shutdown.

No I/O in here: methods take events, and return the messages to send.

Every worker that shuts down sends JOIN to the leader, the lowest rank that lives. When all have,
the leader asks each for its counts of messages sent and received, which each worker sends once it
is idle. Two rounds with the same counts, and as many messages received as sent, mean that nothing
runs and nothing is in flight (Mattern's four-counter method: F. Mattern, "Algorithms for
distributed termination detection", Distributed Computing 2, 1987). Then the leader lets all workers
go.

If the leader is lost, all turn to the next one. A lost worker no longer counts.

Messages may be lost too, with the connection that carried them. So each worker repeats its JOIN
from time to time until it may go. If the leader still waits for the worker's counts, it asks again.
A worker that has missed the last message finds the leader gone.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from zrpc.errors import ProtocolError
from zrpc.wire.member_id import MemberId

__all__ = ["Step", "Termination", "TerminationMessage"]

# After this many rounds with the same counts that don't add up, the missing messages count as lost:
# those sent to a worker that was lost meanwhile never arrive.
_MAX_UNCHANGED_ROUNDS = 20

_LAYOUT = struct.Struct("<BIQQ")
Buffer = bytes | bytearray | memoryview


class Step(IntEnum):
    """The kind of a termination message."""

    JOIN = 1  # to the leader: I am shutting down
    PROBE = 2  # from the leader: send me your counts once you are idle
    COUNTS = 3  # to the leader: my counts
    PROCEED = 4  # from the leader: all is done, leave


@dataclass(frozen=True, slots=True)
class TerminationMessage:
    """One message of the protocol: its step, the round, and two counts."""

    step: Step
    round: int = 0
    sent: int = 0
    received: int = 0

    def pack(self) -> bytes:
        """Returns the message as bytes."""
        return _LAYOUT.pack(self.step, self.round, self.sent, self.received)

    @classmethod
    def parse(cls, data: Buffer) -> TerminationMessage:
        """Returns the message in some bytes.

        Raises:
            ProtocolError: they are not a termination message.
        """
        try:
            step, number, sent, received = _LAYOUT.unpack(data)
            return cls(Step(step), number, sent, received)
        except (struct.error, ValueError) as error:
            raise ProtocolError(f"expected a termination message: {error}") from error


Outgoing = list[tuple[MemberId, TerminationMessage]]


class Termination:
    """One worker's part in the shutdown of its mesh. For one thread at a time.

    Args:
        member: this worker.
        members: all workers that live, this one included.

    Attributes:
        done: whether this worker may leave.
        asked: the leader and the round whose counts this worker still owes, if any.
    """

    def __init__(self, member: MemberId, members: Iterable[MemberId]) -> None:
        self._own_id = member
        self._members = set(members)
        self._joining = False
        self.done = False
        self.asked: tuple[MemberId, int] | None = None
        # Kept by a leader: who has joined, the current round, and whose counts are missing.
        self._joined: set[MemberId] = set()
        self._round = 0
        self._unanswered: set[MemberId] = set()
        self._counts: dict[MemberId, tuple[int, int]] = {}
        self._last_counts: dict[MemberId, tuple[int, int]] = {}
        self._unchanged = 0

    @property
    def leader(self) -> MemberId:
        """The worker that asks the others."""
        return min(self._members)

    @property
    def waits_for_all(self) -> bool:
        """Whether this worker leads a shutdown, and waits until all others join it."""
        return self._joining and self.leader == self._own_id and not self.done

    @property
    def missing(self) -> list[MemberId]:
        """For the leader's error message: the members that have not begun to shut down."""
        return sorted(self._members - self._joined) if self.leader == self._own_id else []

    def begin(self) -> Outgoing:
        """Begins the shutdown of this worker."""
        self._joining = True
        return self._deliver([(self.leader, TerminationMessage(Step.JOIN))])

    def remind(self) -> Outgoing:
        """Sends again what may have been lost; call it now and then."""
        if not self._joining or self.done or self.leader == self._own_id:
            return []
        return [(self.leader, TerminationMessage(Step.JOIN))]

    def receive(self, sender: MemberId, message: TerminationMessage) -> Outgoing:
        """Takes in a message."""
        return self._deliver(self._on(sender, message))

    def idle(self, sent: int, received: int) -> Outgoing:
        """Sends the counts that the leader asked for. Call it when idle, while `asked` is set.

        Args:
            sent: how many messages this worker has ever sent to the workers that live.
            received: how many it has ever received from them.
        """
        if self.asked is None:
            return []
        leader, number = self.asked
        self.asked = None
        return self._deliver([(leader, TerminationMessage(Step.COUNTS, number, sent, received))])

    def admit(self, member: MemberId) -> None:
        """Adds a worker that joined the mesh: it must shut down as well."""
        if not self.done:
            self._members.add(member)

    def on_member_lost(self, member: MemberId) -> Outgoing:
        """Removes a worker that is gone."""
        if member not in self._members or member == self._own_id:
            return []
        leader_lost = member == self.leader
        self._members.discard(member)
        self._joined.discard(member)
        if self.asked is not None and self.asked[0] == member:
            self.asked = None
        if leader_lost:
            join = [(self.leader, TerminationMessage(Step.JOIN))]
            return self._deliver(join if self._joining and not self.done else [])
        # The loss has changed the others' counts: ask again.
        return self._deliver(self._ask() if self._leads else [])

    def _deliver(self, messages: Outgoing) -> Outgoing:
        """Handles the messages to this worker itself at once; returns the rest."""
        outgoing: Outgoing = []
        while messages:
            to, message = messages.pop(0)
            if to == self._own_id:
                messages.extend(self._on(to, message))
            else:
                outgoing.append((to, message))
        return outgoing

    def _on(self, sender: MemberId, message: TerminationMessage) -> Outgoing:
        if message.step is Step.PROCEED:
            # Also from a worker that is gone: it may leave as soon as it has sent this.
            self.done = self._joining
        if sender not in self._members:
            return []
        if message.step is Step.JOIN:
            again = sender in self._joined
            self._joined.add(sender)
            if not self._leads:
                return []
            if again:
                return [(sender, self._probe())] if sender in self._unanswered else []
            return self._ask()
        if message.step is Step.PROBE:
            self.asked = (sender, message.round)
        elif (message.step, message.round) == (Step.COUNTS, self._round):
            self._unanswered.discard(sender)
            self._counts[sender] = (message.sent, message.received)
            # A worker that came to the mesh meanwhile must join first.
            return self._evaluate() if not self._unanswered and self._leads else []
        return []

    @property
    def _leads(self) -> bool:
        """Whether this worker leads, and all have joined."""
        return self.leader == self._own_id and self._joined == self._members and not self.done

    def _ask(self) -> Outgoing:
        """As leader: begins a round."""
        self._round += 1
        self._unanswered = set(self._members)
        self._counts = {}
        return [(member, self._probe()) for member in sorted(self._members)]

    def _probe(self) -> TerminationMessage:
        return TerminationMessage(Step.PROBE, self._round)

    def _evaluate(self) -> Outgoing:
        """As leader, with all counts of a round: begins another round, or lets all workers go."""
        same = self._counts == self._last_counts
        self._unchanged = self._unchanged + 1 if same else 0
        self._last_counts = self._counts
        balanced = sum(sent - received for sent, received in self._counts.values()) == 0
        if self._unchanged < (1 if balanced else _MAX_UNCHANGED_ROUNDS):
            return self._ask()
        return [(member, TerminationMessage(Step.PROCEED)) for member in sorted(self._members)]

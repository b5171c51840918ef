"""Termination detection: the rules of a graceful shutdown.

No I/O in here: methods take events, and return the messages to send.

Every worker that shuts down sends JOIN to a leader, the lowest rank that lives. When all have,
the leader asks each for its counts of messages sent and received, which each worker sends once it
is idle. Two rounds with the same counts, and as many messages received as sent, mean that nothing
runs and nothing is in flight (Mattern's four-counter method: F. Mattern, "Algorithms for
distributed termination detection", Distributed Computing 2, 1987). Then the leader lets all workers
go.

If the leader is lost, all turn to the next one. A lost worker no longer counts. Two workers may
have lost each other while others reach both. Until all agree which of them goes (see
``zrpc.membership.agreement``), neither they nor those that know of it are idle. So a leader that
lets all go speaks for all.

Messages may be lost, with the connection that carried them. So each worker repeats its JOIN from
time to time until it may go. If the leader still waits for the worker's counts, it asks again. A
worker that has missed the last message finds the leader gone.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from zrpc.errors import expecting
from zrpc.wire.member_id import MemberId

# After this many rounds with the same counts that don't add up, the missing messages count as lost:
# those sent to a worker that was lost meanwhile never arrive.
_MAX_UNCHANGED_ROUNDS = 20

_LAYOUT = struct.Struct("<BIQQ")
Buffer = bytes | bytearray | memoryview


class Step(IntEnum):
    """The kind of a termination message."""

    JOIN = 1  # to a leader: I am shutting down
    PROBE = 2  # from a leader: send me your counts once you are idle
    COUNTS = 3  # to a leader: my counts
    PROCEED = 4  # from a leader: all is done, leave


@dataclass(frozen=True, slots=True)
class TerminationMessage:
    """One message of the protocol.

    Attributes:
        step: its kind.
        round: of a leader that asks for counts.
        sent: a count of messages, as is ``received``.
    """

    step: Step
    round: int = 0
    sent: int = 0
    received: int = 0

    def pack(self) -> bytes:
        """Returns the message as bytes."""
        return _LAYOUT.pack(self.step, self.round, self.sent, self.received)

    @classmethod
    @expecting("a termination message")
    def parse(cls, data: Buffer) -> TerminationMessage:
        """Returns the message in some bytes.

        Raises:
            ProtocolError: they are not a termination message.
        """
        step, number, sent, received = _LAYOUT.unpack(data)
        return cls(Step(step), number, sent, received)


Outgoing = list[tuple[MemberId, TerminationMessage]]


class Termination:
    """One worker's part in the shutdown of its mesh. For one thread at a time.

    Args:
        member: this worker.
        members: all workers that live, this one included.

    Attributes:
        done: whether this worker may leave.
    """

    def __init__(self, member: MemberId, members: Iterable[MemberId]) -> None:
        self._own_id = member
        self._members = set(members)
        self._joining = False
        self.done = False
        # The members that have begun to shut down, as the leader says when it asks for counts.
        self._begun: set[MemberId] = set()
        self._asked: dict[MemberId, int] = {}  # the rounds whose counts this worker still owes
        # Kept by a leader: who has joined, the current round, and whose counts are missing. Also by
        # those that others take for it, since they have lost the present one.
        self._joined: set[MemberId] = set()
        self._round = 0
        self._unanswered: set[MemberId] = set()
        self._void = False  # whether a loss has changed the counts of this round
        self._counts: dict[MemberId, tuple[int, int]] = {}
        self._last_counts: dict[MemberId, tuple[int, int]] = {}
        self._unchanged = 0

    @property
    def asked(self) -> bool:
        """Whether a leader waits for this worker's counts."""
        return bool(self._asked)

    @property
    def all_begun(self) -> bool:
        """Whether all members have begun to shut down, this one included."""
        return self._members <= self._begun

    @property
    def waits_for_all(self) -> bool:
        """Whether this worker leads a shutdown, and waits until all others join it."""
        return self._joining and self._own_id == min(self._members)

    @property
    def missing(self) -> list[MemberId]:
        """For the leader's error message: the members that have not begun to shut down."""
        return sorted(self._members - self._joined) if self.waits_for_all else []

    @property
    def unfinished(self) -> list[MemberId]:
        """For the leader's error message: the members that have begun, and still have work."""
        return sorted(self._unanswered - {self._own_id}) if self._leads else []

    def begin(self) -> Outgoing:
        """Begins the shutdown of this worker."""
        self._joining = True
        return self._deliver(self._join())

    def remind(self) -> Outgoing:
        """Sends again what may have been lost; call it now and then."""
        if not self._joining or self.done or self.waits_for_all:
            return []
        return self._join()

    def receive(self, sender: MemberId, message: TerminationMessage) -> Outgoing:
        """Takes in a message."""
        return self._deliver(self._on(sender, message))

    def idle(self, sent: int, received: int) -> Outgoing:
        """Sends the counts that leaders asked for. Call it when idle, while `asked` is set.

        Args:
            sent: how many messages this worker has ever sent to the workers that live.
            received: how many it has ever received from them.
        """
        asked, self._asked = self._asked, {}
        return self._deliver(
            [
                (leader, TerminationMessage(Step.COUNTS, number, sent, received))
                for leader, number in asked.items()
            ]
        )

    def admit(self, member: MemberId) -> None:
        """Adds a worker that joined the mesh: it must shut down as well."""
        if not self.done:
            self._members.add(member)

    def on_member_lost(self, member: MemberId) -> Outgoing:
        """Removes a worker that is gone."""
        if member not in self._members or member == self._own_id:
            return []
        led = member == min(self._members)
        for members in (self._members, self._joined, self._unanswered):
            members.discard(member)
        self._asked.pop(member, None)
        # The loss has changed the others' counts: ask again. Once this round has ended, since the
        # loss of a host is that of many members.
        self._void = True
        again = self._ask() if self._leads and not self._unanswered else []
        return self._deliver([*again, *(self._join() if led and self._joining else [])])

    def _join(self) -> Outgoing:
        return [(min(self._members), TerminationMessage(Step.JOIN))]

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
            self.done = self.done or self._joining
            return []
        if sender not in self._members or self.done:
            return []
        if message.step is Step.JOIN:
            return self._on_join(sender)
        if message.step is Step.PROBE:
            self._asked[sender] = message.round
            self._begun = set(self._members)
            return []
        if message.round == self._round:
            self._unanswered.discard(sender)
            self._counts[sender] = (message.sent, message.received)
            # A worker that came to the mesh meanwhile must join first.
            return self._evaluate() if not self._unanswered and self._leads else []
        return []

    # -- as leader ---------------------------------------------------------------------------

    @property
    def _leads(self) -> bool:
        """Whether this worker leads, and all have joined."""
        return self.waits_for_all and self._joined == self._members

    def _on_join(self, sender: MemberId) -> Outgoing:
        again = sender in self._joined
        self._joined.add(sender)
        if not self._leads:
            return []
        if again:
            return self._to_all(Step.PROBE, {sender} & self._unanswered)
        return self._ask()

    def _ask(self) -> Outgoing:
        """Begins a round."""
        self._round += 1
        self._void = False
        self._unanswered = set(self._members)
        self._counts = {}
        return self._to_all(Step.PROBE, self._members)

    def _evaluate(self) -> Outgoing:
        """With all counts of a round: begins another round, or lets all workers go."""
        if self._void:
            return self._ask()
        same = self._counts == self._last_counts
        self._unchanged = self._unchanged + 1 if same else 0
        self._last_counts = self._counts
        balanced = sum(sent - received for sent, received in self._counts.values()) == 0
        if self._unchanged < (1 if balanced else _MAX_UNCHANGED_ROUNDS):
            return self._ask()
        return self._to_all(Step.PROCEED, self._members)

    def _to_all(self, step: Step, members: Iterable[MemberId]) -> Outgoing:
        message = TerminationMessage(step, self._round)
        return [(member, message) for member in sorted(members)]

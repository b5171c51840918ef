"""When a mesh has nothing left to do: the rules of a graceful shutdown.

No I/O in here: events come in, messages to send go out.

Every worker that shuts down tells the leader, the lowest rank that lives. When all have, the
leader asks each for its counts of messages sent and received, which each tells once it is
idle. Two rounds with the same counts, as many received as sent, mean that nothing runs and
nothing is under way (Mattern's four-counter method: F. Mattern, "Algorithms for distributed
termination detection", Distributed Computing 2, 1987). Then the leader lets all go.

Should the leader be lost, all turn to the next one. A worker that is lost no longer counts.

A message may be lost as well, with the connection that it was sent by. So each worker repeats from
time to time that it shuts down, until it may go; and the leader asks it again, where it waits for
its counts. A worker that has missed the last word finds the leader gone.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from zrpc.errors import ProtocolError

__all__ = ["Step", "Termination", "TerminationMessage"]

# Rounds of equal counts that don't add up, after which the missing messages are given up: what
# went to a worker that was lost meanwhile never arrives.
_ROUNDS_WITHOUT_CHANGE = 20

_LAYOUT = struct.Struct("<BIQQ")
Buffer = bytes | bytearray | memoryview


class Step(IntEnum):
    """What a termination message says."""

    JOIN = 1  # to the leader: I am shutting down
    PROBE = 2  # from the leader: tell me your counts once you are idle
    COUNTS = 3  # to the leader
    PROCEED = 4  # from the leader: all is done


@dataclass(frozen=True, slots=True)
class TerminationMessage:
    """One message of the protocol: what it says, in which round, and two counts."""

    step: Step
    round: int = 0
    sent: int = 0
    received: int = 0

    def pack(self) -> bytes:
        """The message as bytes."""
        return _LAYOUT.pack(self.step, self.round, self.sent, self.received)

    @classmethod
    def parse(cls, data: Buffer) -> TerminationMessage:
        """The message from its bytes.

        Raises:
            ProtocolError: they are none.
        """
        try:
            step, number, sent, received = _LAYOUT.unpack(data)
            return cls(Step(step), number, sent, received)
        except (struct.error, ValueError) as error:
            raise ProtocolError(f"expected a termination message: {error}") from error


Outgoing = list[tuple[int, TerminationMessage]]


class Termination:
    """One worker's part in the shutdown of its mesh. For one thread at a time.

    Args:
        rank: this worker's.
        members: the ranks of all workers that live, this one included.
    """

    def __init__(self, rank: int, members: Iterable[int]) -> None:
        self._rank = rank
        self._members = set(members)
        self._joining = False
        self.done = False
        # The round that this worker has yet to answer.
        self.asked: tuple[int, int] | None = None
        # Kept by a leader: who has joined, the round under way, whose counts it lacks.
        self._joined: set[int] = set()
        self._round = 0
        self._lacking: set[int] = set()
        self._counts: dict[int, tuple[int, int]] = {}
        self._last: dict[int, tuple[int, int]] = {}
        self._unchanged = 0

    @property
    def leader(self) -> int:
        """The worker that asks the others."""
        return min(self._members)

    @property
    def waits_for_all(self) -> bool:
        """Whether this worker has begun to shut down, and all others are to tell it."""
        return self._joining and self.leader == self._rank and not self.done

    @property
    def missing(self) -> list[int]:
        """For the leader's error message: who has not begun to shut down."""
        return sorted(self._members - self._joined) if self.leader == self._rank else []

    def begin(self) -> Outgoing:
        """This worker shuts down."""
        self._joining = True
        return self._deliver([(self.leader, TerminationMessage(Step.JOIN))])

    def remind(self) -> Outgoing:
        """Says again what may have been lost; to be called now and then."""
        if not self._joining or self.done or self.leader == self._rank:
            return []
        return [(self.leader, TerminationMessage(Step.JOIN))]

    def receive(self, sender: int, message: TerminationMessage) -> Outgoing:
        """A message came in."""
        return self._deliver(self._on(sender, message))

    def idle(self, sent: int, received: int) -> Outgoing:
        """This worker has nothing to do; to be called while `asked` is set.

        Args:
            sent: messages that it ever sent to the workers that live.
            received: messages that it ever received from them.
        """
        if self.asked is None:
            return []
        leader, number = self.asked
        self.asked = None
        return self._deliver([(leader, TerminationMessage(Step.COUNTS, number, sent, received))])

    def admit(self, rank: int) -> None:
        """A worker has come to the mesh: it has to shut down as well."""
        if not self.done:
            self._members.add(rank)

    def lose(self, rank: int) -> Outgoing:
        """A worker is gone."""
        if rank not in self._members or rank == self._rank:
            return []
        leader_lost = rank == self.leader
        self._members.discard(rank)
        self._joined.discard(rank)
        if self.asked is not None and self.asked[0] == rank:
            self.asked = None
        if leader_lost:
            join = [(self.leader, TerminationMessage(Step.JOIN))]
            return self._deliver(join if self._joining and not self.done else [])
        # What the others count has changed with the loss: ask again.
        return self._deliver(self._ask() if self._leads else [])

    def _deliver(self, messages: Outgoing) -> Outgoing:
        """Handles at once what goes to this worker itself; returns the rest."""
        outgoing: Outgoing = []
        while messages:
            to, message = messages.pop(0)
            if to == self._rank:
                messages.extend(self._on(to, message))
            else:
                outgoing.append((to, message))
        return outgoing

    def _on(self, sender: int, message: TerminationMessage) -> Outgoing:
        if message.step is Step.PROCEED:
            # Also from a worker that has gone since: it may go as soon as it has said this.
            self.done = self._joining
        if sender not in self._members:
            return []
        if message.step is Step.JOIN:
            again = sender in self._joined
            self._joined.add(sender)
            if not self._leads:
                return []
            if again:
                return [(sender, self._probe())] if sender in self._lacking else []
            return self._ask()
        if message.step is Step.PROBE:
            self.asked = (sender, message.round)
        elif (message.step, message.round) == (Step.COUNTS, self._round):
            self._lacking.discard(sender)
            self._counts[sender] = (message.sent, message.received)
            # Where a worker has come to the mesh meanwhile, it has to join first.
            return self._evaluate() if not self._lacking and self._leads else []
        return []

    @property
    def _leads(self) -> bool:
        """Whether this worker leads, and all have joined."""
        return self.leader == self._rank and self._joined == self._members and not self.done

    def _ask(self) -> Outgoing:
        """Leader: begins a round."""
        self._round += 1
        self._lacking = set(self._members)
        self._counts = {}
        return [(rank, self._probe()) for rank in sorted(self._members)]

    def _probe(self) -> TerminationMessage:
        return TerminationMessage(Step.PROBE, self._round)

    def _evaluate(self) -> Outgoing:
        """Leader: all counts of a round are there."""
        same = self._counts == self._last
        self._unchanged = self._unchanged + 1 if same else 0
        self._last = self._counts
        balanced = sum(sent - received for sent, received in self._counts.values()) == 0
        if self._unchanged < (1 if balanced else _ROUNDS_WITHOUT_CHANGE):
            return self._ask()
        return [(rank, TerminationMessage(Step.PROCEED)) for rank in sorted(self._members)]

"""Which forks were lost with the calls and answers that brought them. No I/O in here.

A worker that gave forks to another one asks about them when messages to it were lost (CHECK of
`zrpc.services.rref.protocol`). The other one keeps those that have not come in here. A message may
still be in flight, so a fork is lost only after some answers of its giver to other questions: with
such an answer, all has come that the giver had sent before (`zrpc.services.inspection.questions`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zrpc.services.rref.messages import ForkId, RRefId
from zrpc.wire.member_id import MemberId

# The first question may have been asked before the giver sent its own. What was read from a
# connection that broke may come behind what the next one brings, but not by two questions.
_ANSWERS = 3


@dataclass(slots=True)
class Absent:
    """A fork that has not come.

    Attributes:
        rref_id: the value.
        fork_id: the fork.
        giver: the member that asks.
        parent_id: the fork's parent there; `NO_FORK` if the giver is the owner.
    """

    rref_id: RRefId
    fork_id: ForkId
    giver: MemberId
    parent_id: ForkId
    _answers: int = 0  # of the giver, since it has asked

    def is_lost(self) -> bool:
        """Counts an answer of the giver; returns whether these are enough."""
        self._answers += 1
        return self._answers >= _ANSWERS


class LostForks:
    """The forks that this worker was asked about, and which have not come."""

    def __init__(self) -> None:
        self._absent: dict[ForkId, Absent] = {}

    @property
    def givers(self) -> set[MemberId]:
        """The members that gave them."""
        return {absent.giver for absent in self._absent.values()}

    def expect(self, absent: Absent) -> None:
        """Notes a fork that has not come yet."""
        self._absent[absent.fork_id] = absent

    def on_answered(self, giver: MemberId) -> Iterator[Absent]:
        """Counts an answer of a member; yields the forks that have come since, or are lost.

        Each is forgotten when the next one is asked for: if there is no memory meanwhile, it is
        yielded again after the next answer.
        """
        for absent in [each for each in self._absent.values() if each.giver == giver]:
            if absent.is_lost():
                yield absent
                del self._absent[absent.fork_id]

    def forget(self, giver: MemberId) -> None:
        """Forgets the forks that a lost member gave."""
        self._absent = {f: each for f, each in self._absent.items() if each.giver != giver}

"""What an owner knows of one of its values: which workers have forks of it. No I/O in here."""

from __future__ import annotations

from dataclasses import dataclass, field

from zrpc.services.rref.messages import ForkId
from zrpc.wire.member_id import MemberId


@dataclass(slots=True)
class Owned:
    """One value of an owner's: the forks by holder, and its own handles."""

    forks: dict[ForkId, MemberId] = field(default_factory=dict)
    handles: int = 0
    # Forks whose DELETE came first, with its sender; the message that lists them is in flight.
    ended_early: dict[ForkId, MemberId] = field(default_factory=dict)
    # Forks that a child has named as its parent, with the parent's holder and the worker that
    # named it; the message that lists them is in flight too.
    announced: dict[ForkId, tuple[MemberId, MemberId]] = field(default_factory=dict)

    @property
    def used(self) -> bool:
        """Whether it has a handle or a fork, or a message about one is in flight."""
        return bool(self.forks or self.handles or self.ended_early or self.announced)

    def forget(self, member: MemberId) -> None:
        """Drops the forks of a lost member, and the parents that it named: they may have ended."""
        for by_member in (self.forks, self.ended_early):
            for fork_id in [f for f, holder in by_member.items() if holder == member]:
                del by_member[fork_id]
        for fork_id in [f for f, members in self.announced.items() if member in members]:
            del self.announced[fork_id]

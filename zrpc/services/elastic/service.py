"""How a worker joins and leaves a mesh that runs, and learns of others that do.

First it *claims* its name and its rank, in the log (``zrpc.services.elastic.log``, whose rules are
those of ``zrpc.services.elastic.state``). With the member id that it then has, its agent starts,
and all members introduce it as they read the log. Once all have noted that, it announces that it is
in. Once all have noted that too, it can be found everywhere.

One thread of each worker reads the log, several times a second, since not every store has an event
for a new entry (``zrpc.services.elastic.follower``). It uses the store alone; changes to the agent
are made in the agent's I/O thread, here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from typing_extensions import override

from zrpc.agent.agent import Agent
from zrpc.agent.service import Service
from zrpc.membership.endpoints import endpoint_of
from zrpc.membership.failure_detector import Reason
from zrpc.services.elastic.follower import LogFollower
from zrpc.services.elastic.log import MembershipLog
from zrpc.services.elastic.state import Change, ChangeKind, MembershipState
from zrpc.wire.member_id import MemberId

__all__ = ["ElasticMembership"]


class ElasticMembership(Service):
    """Keeps an agent's view of its mesh as the log says.

    Its methods run in the I/O thread, but for `close`. At first the agent
    knows no other worker, and the state is that in which its worker was accepted.

    Attributes:
        follower: reads the log; must be started when the agent serves.
    """

    def __init__(self, agent: Agent, log: MembershipLog, state: MembershipState) -> None:
        super().__init__(agent)
        self._last_message_seconds = state.limits.last_message_seconds
        self.follower = LogFollower(agent, log, state, self._apply_changes)
        agent.membership.set_starts(dict(state.starts))
        for record, why in state.departed.values():
            # Others may still pass on references that it owned.
            agent.peers.introduce(record, "")
            agent.peers.remove(record.member_id, why)
        for member, record in state.members.items():
            if member == agent.membership.own_id:
                continue
            agent.peers.introduce(record, endpoint_of(agent.membership, record))
            if member in state.admitted:
                agent.peers.admit(member)

    @override
    def on_member_lost(self, member: MemberId) -> None:
        """Reports the loss of a peer in the log, if this worker has seen its process end."""
        reason = self.agent.liveness.reason(member)
        self.agent.joined.forget(member)
        if not self.agent.liveness.may_live(member):
            self.agent.network.dismiss(member)
        if reason is Reason.ENDED:
            self.follower.report_loss(member, Reason.ENDED)

    @override
    def close(self) -> None:
        self.follower.close()

    def _apply_changes(
        self, changes: Sequence[tuple[Change, str]], starts: Mapping[int, int]
    ) -> None:
        """Makes changes to the agent; see `LogFollower`."""
        for change, endpoint in changes:
            member = change.record.member_id
            if change.kind is ChangeKind.INTRODUCED:
                self.agent.peers.introduce(change.record, endpoint)
            elif change.kind is ChangeKind.ADMITTED:
                self.agent.peers.admit(member)
            else:
                assert change.why is not None
                heard = change.why is Reason.LEFT and self.agent.dispatcher.received.get(member)
                patience = self._last_message_seconds if heard else 0.0
                self.agent.peers.remove(member, change.why, patience)
        self.agent.membership.set_starts(starts)

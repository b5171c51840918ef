"""Plugs `zrpc.membership.agreement` into an agent: tells of losses, and learns of those of others.

A worker tells only those that it talks to, so no connection is made for it. The others learn of it
when they talk to a worker that is out.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial

from typing_extensions import override

from zrpc.agent.agent import Agent
from zrpc.agent.service import Handler, Service
from zrpc.membership.agreement import Agreement, How, LossNote, pack_notes, parse_notes
from zrpc.membership.failure_detector import Reason
from zrpc.wire.kind import Kind
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message

# Why a worker is lost here that others may still reach.
_UNREACHED = (Reason.SILENT, Reason.NO_WAY_BACK, Reason.DECLARED_DEAD)
# How long to wait for the last messages of a worker whose process has ended, as others say.
_LAST_MESSAGE_SECONDS = 2.0


class AgreementService(Service):
    """Lets all workers that reach each other agree about who is lost. In the I/O thread."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self._agreement = Agreement(agent.membership.own_id, agent.options.heartbeat_timeout)

    @override
    def handlers(self) -> Mapping[Kind, Handler]:
        return {Kind.LOST: self._on_lost}

    @override
    def tick(self) -> None:
        agent, now = self.agent, time.monotonic()
        reaches = agent.liveness.answers
        while (note := self._agreement.judge(now, agent.membership.living, reaches)) is not None:
            agent.peers.put_out(note)
            # It may have no connection to this worker. Behind what closes its mailboxes.
            tell = partial(agent.peers.tell, note.member)
            agent.completions.submit(partial(agent.receiver.in_io_thread, tell))
        for member in self._talks_to():
            if notes := self._agreement.untold(member):
                agent.outbox.post(member, Message(Kind.LOST, body=pack_notes(notes)))

    @override
    def on_member_lost(self, member: MemberId) -> None:
        self._agreement.lose(member, self._note(member), time.monotonic())

    @override
    def on_messages_lost(self, member: MemberId) -> None:
        self._agreement.tell_again(member)

    @override
    def idle(self) -> bool:
        """Returns whether all members that this worker talks to agree with it, as far as it knows.

        What they are told comes before the next question of a leader.
        """
        rules = self._agreement
        return rules.settled(time.monotonic()) and all(map(rules.is_told, self._talks_to()))

    def _note(self, member: MemberId) -> LossNote | None:
        """Returns what the others are to be told of a loss."""
        membership = self.agent.membership
        own_id, reason = membership.own_id, self.agent.liveness.reason(member)
        if reason is Reason.PUT_OUT:
            return self.agent.peers.verdict(member)
        how = How.UNREACHED if reason in _UNREACHED else None
        if reason is Reason.ENDED and not membership.shares_host(member):
            how = How.UNREACHED  # a firewall that refuses connections looks like this, too
        elif reason is Reason.ENDED and not all(map(membership.shares_host, membership.living)):
            how = How.ENDED  # workers on this host see that themselves
        found = membership.was_found(member)
        return LossNote(how, member, own_id, own_id) if how is not None and found else None

    def _talks_to(self) -> list[MemberId]:
        agent = self.agent
        received, own_id = agent.dispatcher.received, agent.membership.own_id
        return [
            member
            for member in agent.membership.living
            if member != own_id and (received.get(member) or agent.network.knows(member))
        ]

    def _on_lost(self, message: Message) -> None:
        membership, peers = self.agent.membership, self.agent.peers
        for note in parse_notes(message.body):
            member = note.member
            if not membership.was_found(member):
                continue
            if note.how is How.PUT_OUT:
                peers.put_out(note)
            elif member in membership.lost:
                continue
            elif note.how is How.UNREACHED:
                # Found out by heartbeats: this worker reaches both, or drops one of them, too.
                self.agent.liveness.suspected |= {message.sender, member}
                self._agreement.hear(message.sender, note, time.monotonic())
            elif member != membership.own_id:
                peers.remove(member, Reason.ENDED, _LAST_MESSAGE_SECONDS)

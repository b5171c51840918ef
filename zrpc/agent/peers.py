"""The members that come, go and are lost: what an agent does about each."""

from __future__ import annotations

import logging
import math
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from zrpc.agent.dispatcher import Dispatcher
from zrpc.agent.shutdown import Shutdown
from zrpc.errors import ProtocolError, expecting
from zrpc.membership.agreement import LossNote, pack_notes
from zrpc.membership.failure_detector import Loss, Reason
from zrpc.membership.hooks import Hooks
from zrpc.membership.liveness import LivenessMonitor
from zrpc.membership.peer_record import PeerRecord
from zrpc.membership.view import Membership
from zrpc.transport.chunks import BEGINS_CHUNK
from zrpc.transport.curve import PeerKey
from zrpc.transport.network import Network
from zrpc.wire.kind import Kind
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message, parse

logger = logging.getLogger(__name__)

# How often a worker that was declared dead, and is heard again, is told so.
_TELL_DEAD_SECONDS = 1.0
# How long that message has to be sent. The lost worker may not exist any more.
_SEND_SECONDS = 10.0
# These losses are known to the lost worker.
_SAID_BY_ITSELF = (Reason.LEFT, Reason.DECLARED_DEAD, Reason.NO_WAY_BACK)
_LEAVE = struct.Struct("<?Q")  # and then the address that was tried


@dataclass(frozen=True, slots=True)
class LeaveMessage:
    """The body of a LEAVE.

    Attributes:
        declared_dead: the sender has declared the receiver dead. Else the sender leaves by itself.
        sent: how many counted messages the sender has sent to the receiver, if it leaves with
            nothing left to do; else 0.
        tried: the receiver's address if the sender could never connect to it; else empty.

    Example:
        >>> LeaveMessage.parse(LeaveMessage(sent=3).pack().body)
        LeaveMessage(declared_dead=False, sent=3, tried='')
    """

    declared_dead: bool = False
    sent: int = 0
    tried: str = ""

    def pack(self) -> Message:
        """Returns the message."""
        body = _LEAVE.pack(self.declared_dead, self.sent) + self.tried.encode()
        return Message(Kind.LEAVE, body=body)

    @classmethod
    @expecting("the body of a LEAVE")
    def parse(cls, body: bytes | bytearray | memoryview) -> LeaveMessage:
        """Reads the body of a LEAVE.

        Raises:
            ProtocolError: it is none.
        """
        declared_dead, sent = _LEAVE.unpack_from(body)
        return cls(declared_dead, sent, bytes(body[_LEAVE.size :]).decode())


@dataclass(eq=False)
class Peers:
    """Admits and drops members. In the I/O thread, or before the agent serves, except `why_lost`.

    Args:
        liveness: finds out which members are lost.
        joined: called for each other member that joins.
        lost: called for each member that is lost.
        on_member_lost: drops what belongs to a member that is lost.
        explain: for error messages, what is known about why a member does not answer.
    """

    _network: Network
    _membership: Membership
    _liveness: LivenessMonitor
    _shutdown: Shutdown
    _joined: Hooks
    _lost: Hooks
    _on_member_lost: Callable[[MemberId], None]
    _explain: Callable[[MemberId], str]

    def __post_init__(self) -> None:
        # When lost members were told so last; their mailboxes are open since.
        self._told_dead: dict[MemberId, float] = {}
        # What was said of the members that are put out; with this worker, if it is out itself.
        self._put_out: dict[MemberId, LossNote] = {}
        # The routing ids of the members' heartbeats, as the last greeting of each shows.
        self._heartbeats: dict[MemberId, bytes] = {}
        for info in self._membership.infos.values():
            if info != self._membership.info:
                self._joined.notify(info)

    def use(self, dispatcher: Dispatcher) -> None:
        """Handles the messages of members that leave. Only before the agent serves."""
        self._dispatcher = dispatcher
        dispatcher.register(Kind.LEAVE, self._on_leave)

    def why_lost(self, member: MemberId) -> str:
        """For error messages: which worker is gone, why, and when it was last heard. Any thread."""
        return self._liveness.describe_loss(member) + self._explain(member)

    def tick(self) -> None:
        """Finds out which members are lost; to be called often."""
        for peer, first in self._network.heartbeats.notices():
            identity = self._membership.records[MemberId(peer)].identity
            self._dispatcher.dispatch(deque([(identity, first, ())]))
        for loss in self._liveness.tick(self._shutdown.waits_long_for_all):
            self._drop_or_log(loss)
        before = time.monotonic() - _SEND_SECONDS
        for member in [m for m, told in self._told_dead.items() if told < before]:
            del self._told_dead[member]
            self._network.drop(member)

    # -- what services learn of members ----------------------------------------------------

    def introduce(self, record: PeerRecord, endpoint: str) -> None:
        """Makes known a worker that is about to join the mesh, reachable at ``endpoint``."""
        member = record.member_id
        self._membership.introduce(record)
        self._dispatcher.introduce(member)
        self._network.introduce(member, endpoint, PeerKey(record.public_key, record.identity))
        self._liveness.add(member)

    def admit(self, member: MemberId) -> None:
        """Makes a worker that was introduced a member, which can be found."""
        if self._membership.admit(member):
            self._shutdown.admit(member)
            self._joined.notify(self._membership.infos[member])

    def remove(self, member: MemberId, reason: Reason, patience: float = 0.0) -> None:
        """Drops a member that is gone, as other members say.

        With patience, that waits until the member has announced it itself, after the last of its
        messages, but for no more seconds than that.
        """
        sent = math.inf if patience else 0
        loss = self._liveness.leave(member, reason, sent, within=patience)
        if loss is not None:
            self._drop(loss)

    def put_out(self, note: LossNote) -> None:
        """Drops a member that a judge has put out; all others, if that is this worker itself."""
        self._put_out[note.member] = note
        judge, other = (self._membership.infos.get(each) for each in (note.judge, note.other))
        names = [each.name if each else "another worker" for each in (judge, other)]
        why = "{} has decided that, since it and {} had lost each other".format(*names)
        if note.member == self._membership.own_id:
            self.drop_all(why)
        else:
            self._drop_for([note.member], Reason.PUT_OUT, why)

    def drop_all(self, why: str) -> None:
        """Drops all members, and those about to join: this worker was put out of the mesh."""
        others = {*self._membership.living, *self._membership.awaited}
        self._drop_for(others - {self._membership.own_id}, Reason.OUT, why)

    def _drop_for(self, members: Iterable[MemberId], reason: Reason, why: str) -> None:
        for member in members:
            if (loss := self._liveness.leave(member, reason, why=f": {why}")) is not None:
                self._drop_or_log(loss)

    def verdict(self, member: MemberId) -> LossNote | None:
        """Returns what was said of a member if it is put out."""
        return self._put_out.get(member)

    def recall(self, member: MemberId) -> None:
        """Makes known a member that another speaks of, and that was gone before this one came.

        Raises:
            ProtocolError: there was no such member.
        """
        record = self._membership.departed_record(member)
        if record is None:
            raise ProtocolError(f"expected the id of a member, found {member}")
        self.introduce(record, "")
        self.remove(member, Reason.LEFT)

    # -- messages --------------------------------------------------------------------------

    def on_outsider(self, identity: bytes, first: bytes, buffers: Sequence[Any]) -> None:
        """Deals with a message whose sender is no member.

        Admits a sender that was introduced. Tells a sender that was declared dead so, as it must
        not wait for this worker. Ignores all others: the waker of this worker, and strangers.
        """
        watcher = self._membership.watcher_of(identity)
        if watcher is not None:
            self._heartbeats[watcher] = identity
            self._on_greeting(watcher)
            return
        member = self._membership.introduced_as(identity)
        if member is None:
            return
        if member in self._membership.awaited:
            # A worker that sends has joined, even if this one has yet to hear of that.
            self.admit(member)
            self._dispatcher.dispatch(deque([(identity, first, buffers)]))
            return
        if first[:1] == BEGINS_CHUNK:
            return
        message = parse(first, (), member)
        if message.kind == Kind.TERMINATION:
            # It may have gone together with the word that all may go.
            self._shutdown.receive(member, message.body)
        if message.kind != Kind.LEAVE and not self._knows(member):
            self.tell(member)

    def tell(self, member: MemberId) -> None:
        """Tells a member that is lost so, by a mailbox, at most once in a while."""
        now = time.monotonic()
        if now > self._told_dead.get(member, -math.inf) + _TELL_DEAD_SECONDS:
            self._told_dead[member] = now
            self._network.notify(member, self._notice(member))

    def _on_greeting(self, member: MemberId) -> None:
        """A member begins to watch whether this worker lives, or has connected again for that."""
        if member not in self._membership.lost:
            self._liveness.greeted(member)
        elif not self._knows(member):
            self._answer_heartbeats(member)

    def _answer_heartbeats(self, member: MemberId) -> None:
        """Tells a member that is lost so by its own connection; see `zrpc.transport.heartbeat`."""
        routing_id = self._heartbeats.get(member)
        if routing_id is not None:
            self._network.answer_heartbeats(routing_id, self._notice(member))

    def _notice(self, member: MemberId) -> bytes:
        verdict = self._put_out.get(self._membership.own_id) or self._put_out.get(member)
        if verdict is not None:
            return Message(Kind.LOST, body=pack_notes([verdict])).first_frame()
        tried = self._liveness.tried_in_vain(member)
        return LeaveMessage(declared_dead=True, tried=tried).pack().first_frame()

    def _knows(self, member: MemberId) -> bool:
        """Whether a member that is lost has said so itself, or reads it in an elastic mesh's log.

        One that has said that it leaves may be heard again before its end, and ask for heartbeats.
        """
        reason = self._liveness.reason(member)
        out_by_log = reason is Reason.OUT and self._membership.own_id not in self._put_out
        return out_by_log or reason in _SAID_BY_ITSELF

    def _on_leave(self, message: Message) -> None:
        said = LeaveMessage.parse(message.body)
        reason = Reason.DECLARED_DEAD if said.declared_dead else Reason.LEFT
        if said.tried:
            reason = Reason.NO_WAY_BACK
        self._liveness.heard_that_it_leaves(message.sender)
        loss = self._liveness.leave(message.sender, reason, said.sent, said.tried)
        if loss is not None:
            self._drop(loss)

    def _drop_or_log(self, loss: Loss) -> None:
        """Drops a member; logs an error, so that the losses found with this one are dealt with."""
        try:
            self._drop(loss)
        except Exception:
            lost = self._membership.infos[loss.member]
            logger.exception("%s: not all is done about %s", self._membership.info, lost)

    def _drop(self, loss: Loss) -> None:
        """Drops a member that is lost, as the membership knows already."""
        member = loss.member
        self._dispatcher.forget(member)
        if not self._knows(member):
            self._answer_heartbeats(member)
        if self._membership.was_found(member):
            logger.info("%s: %s", self._membership.info, self.why_lost(member))
        self._on_member_lost(member)
        self._shutdown.on_member_lost(member)
        if not self._shutdown.done and self._membership.was_found(member):
            self._lost.notify(self._membership.infos[member])

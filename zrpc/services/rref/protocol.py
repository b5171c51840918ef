"""The rules of the distributed reference count. No I/O: events in, messages out.

A value lives on its *owner*. Every other worker that has a reference to it is a *user*; each
handle of a user is a *fork* with an id of its own. The owner lists all forks. It frees the value
once the list is empty and it has no handle itself. There are two guarantees, as in torch's
"Remote Reference Protocol":

G1: the owner learns when a fork ends. (DELETE)

G2: a fork that handed on a child stays listed until the owner lists the child. So there is
always a listed fork while any fork lives, and the owner can't free the value too early.

Nobody waits for a DELETE, nor a parent for ADDED: these leave together with others.

A fork that is handed on (*child*) travels inside some message, by `References.fork`. The worker
that receives it (`References.receive`) tells the owner (ADD). The owner tells the receiver and
the parent (ADDED), and the parent then no longer waits for the child. An owner that hands on its
own handle lists the child before it sends the message. If a child arrives at the owner, the owner
tells the parent at once.

============ ======================= ===================================================
message      from, to                meaning
============ ======================= ===================================================
ADD          user, owner             I hold this fork, which that parent gave me; without a parent:
                                     which I had before the value was made again
ADDED        owner, user and parent  this fork is listed
DELETE       user, owner             this fork has ended
RESEND       any, any                a message of yours is missing: send it and the later ones again
CHECK        owner or parent, user   I gave you this fork, perhaps in a message that is lost
============ ======================= ===================================================

Messages may arrive in any order and more than once:

- Repeats are recognized by their serial number, counted for each pair of workers. A message that
  carries a fork (a call, an answer) has none. If a fork arrives at its user again, it gets one
  more handle there, or none if it was among the last forks to end. An owner takes it for another
  fork.
- A message may be lost as a connection breaks. That shows by a number that is left out for some
  seconds after a later one has come. Each worker keeps its latest messages to each other one, to
  send them again. If a handler had no memory for a message, it is sent again at once.
- A call or an answer with forks may be lost too. So on RESEND, a worker also asks about the latest
  forks that it gave to the other one and that may not have come. If the other one does not know a
  fork, it lets it end: DELETE to the owner, ADDED to a parent. Not at once, since the message may
  still be in flight, but after some answers of the giver to other questions: with such an answer,
  all has come that the giver had sent before (``zrpc.services.inspection.questions``).
- A DELETE that arrives before the message that lists its fork is kept until then.
- A fork that arrives with a request must be listed before the handler of the request begins: see
  `References.begin_when_listed`.
- A child names its parent. If the owner hears of the child first, it knows that the message that
  lists the parent is still in flight (by G2 the parent can't have ended). It frees nothing until
  that message arrives.

Two workers may lose each other while both still talk to a third one. One of them is then lost to
all (see ``zrpc.membership.agreement``). So a worker that waits for word about a fork loses either
the sender of that word, or the worker that has the fork.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from heapq import nlargest

from zrpc.agent.service import LOST_AFTER_ANSWERS
from zrpc.services.rref.messages import NO_FORK, Fork, ForkId, ReferenceMessage, RRefId, Verb
from zrpc.services.rref.records import ASKED, Absent, Held, Link, Owned
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message

# A request, and what begins its handler. The rules only keep it.
Handler = tuple[Message, Callable[[], None]]

# A user remembers this many ended forks, in case the message with one of them comes again.
_ENDED_REMEMBERED = 64


@dataclass(slots=True, eq=False)
class _Waiting:
    """A handler that begins when its forks are listed, or after the deadline."""

    handler: Handler
    unlisted: set[ForkId]
    deadline: float


class References:
    """One worker's part in the reference count, as owner and as user.

    For one thread at a time. After each event the caller calls `look`, and takes what has gathered
    in `outgoing`, messages to send, each with its receiver, in `freed`, values to free, in
    `unmade`, values that will never be made, and in `ready`, handlers that may begin.

    Attributes:
        urgent: whether somebody waits for what has gathered in `outgoing`. If not, it should leave
            soon, together with what follows.
        unseen: the values and forks that may be unused, until `look`. An event adds them first, and
            does not look itself. So if there is no memory for a part of that, it is done later.
    """

    def __init__(self, member: MemberId) -> None:
        self._own_id = member
        # A message about a value may come before its creation.
        self._owned: defaultdict[RRefId, Owned] = defaultdict(Owned)
        self._held: dict[ForkId, Held] = {}
        # Unlisted children of ours, to our fork, and the members that were given them.
        self._children: dict[ForkId, tuple[ForkId, MemberId]] = {}
        # The latest of our forks that have ended: a message may come twice.
        self._ended: dict[ForkId, None] = {}
        # Forks with an ADD that is not answered yet, with their owner.
        self._adding: dict[ForkId, MemberId] = {}
        self._waiting: list[_Waiting] = []
        # The forks that this worker was asked about, and which have not come.
        self._absent: dict[ForkId, Absent] = {}
        self._lost: set[MemberId] = set()
        self._links: defaultdict[MemberId, Link] = defaultdict(Link)  # not to the lost
        self.unseen: deque[RRefId | ForkId] = deque()
        self.outgoing: list[tuple[MemberId, ReferenceMessage]] = []
        self.urgent = False
        self.freed: list[RRefId] = []
        self.unmade: list[RRefId] = []
        self.ready: list[Handler] = []

    @property
    def awaited(self) -> set[MemberId]:
        """The members that were given forks which no owner lists yet, or that gave absent ones."""
        receivers = {receiver for _, receiver in self._children.values()}
        return receivers | {absent.giver for absent in self._absent.values()}

    @property
    def idle(self) -> bool:
        """Whether this worker, as user, waits for no message of the protocol."""
        return not (self._children or self._adding or self.unseen)

    def sizes(self) -> tuple[int, int]:
        """Returns how many values are owned here, and how many forks are held."""
        return len(self._owned), len(self._held)

    def is_listed(self, fork_id: ForkId) -> bool:
        """Returns whether the owner has confirmed this fork; asked at the user."""
        held = self._held.get(fork_id)
        return held is not None and held.listed

    # -- the owner -----------------------------------------------------------------------

    def retain(self, rref_id: RRefId) -> None:
        """Counts one more handle of the owner's."""
        self._owned[rref_id].handles += 1

    def release(self, rref_id: RRefId) -> None:
        """Counts one handle of the owner's less."""
        # Else it was never counted, because Ctrl-C came, or was dropped before.
        owned = self._owned.get(rref_id)
        if owned and owned.handles:
            self.unseen.append(rref_id)
            owned.handles -= 1

    def add(self, rref_id: RRefId, fork_id: ForkId, holder: MemberId) -> None:
        """Lists a fork at the owner: when ``remote`` creates it, or on ADD."""
        self.unseen.append(rref_id)
        owned = self._owned[rref_id]
        owned.announced.pop(fork_id, None)
        if owned.ended_early.pop(fork_id, None) is None and holder not in self._lost:
            owned.forks[fork_id] = holder

    def _announce(
        self, rref_id: RRefId, child: ForkId, parent_id: ForkId, sender: MemberId
    ) -> None:
        """Notes the parent that a child has named: it lives, and is listed or about to be."""
        owned, holder = self._owned[rref_id], child.created_on
        known = parent_id in owned.forks or parent_id == NO_FORK
        if not known and holder not in self._lost:
            owned.announced[parent_id] = (holder, sender)

    def _delete(self, rref_id: RRefId, fork_id: ForkId, sender: MemberId) -> None:
        known = rref_id in self._owned and fork_id in self._owned[rref_id].forks
        if not known and fork_id in self._links[sender].asked:
            return  # it ended before it was asked about, and its user no longer knew that
        self.unseen.append(rref_id)
        owned = self._owned[rref_id]
        if owned.forks.pop(fork_id, None) is None:
            owned.ended_early[fork_id] = sender

    # -- the user ------------------------------------------------------------------------

    def create(self, rref_id: RRefId, fork_id: ForkId, owner: MemberId) -> None:
        """Notes a value that ``owner`` makes for this worker; that message lists the fork."""
        self._held[fork_id] = Held(rref_id, owner)

    def cancel_create(self, fork_id: ForkId) -> None:
        """Undoes `create`: the message is not sent after all, and nobody has the fork."""
        self._held.pop(fork_id, None)  # None if Ctrl-C came before it

    def on_not_made(self, rref_id: RRefId, fork_id: ForkId, owner: MemberId) -> None:
        """Notes, once, that the message of `create` never comes to the owner.

        The fork may have ended, or have children, which name it as their parent. So the owner must
        list it nevertheless. An ADD whose parent is the fork itself means: list it; its value is
        never made.
        """
        self._send(owner, Verb.ADD, rref_id, fork_id, fork_id)

    def drop(self, fork_id: ForkId) -> None:
        """Counts one handle of a fork less."""
        held = self._held.get(fork_id)
        # Else the fork had ended when its message came once more, or see `release`.
        if held and held.handles:
            self.unseen.append(fork_id)
            held.handles -= 1

    def on_listed(self, fork_id: ForkId) -> None:
        """Notes that the owner lists a fork: ours, or a child of ours."""
        self._end_adding({fork_id})
        held = self._held.get(fork_id)
        if held is not None:
            held.listed = True
        if fork_id in self._children:
            parent_id, _ = self._children[fork_id]
            self.unseen.append(parent_id)
            self._held[parent_id].children -= 1
            del self._children[fork_id]

    def move(self, owners: Mapping[RRefId, MemberId]) -> None:
        """Lists this worker's forks with the workers that make the values of lost owners again.

        An ADD without a parent means: I had this fork before you had the value.
        """
        for fork_id, held in self._held.items():
            owner = owners.get(held.rref_id)
            if owner is not None and owner not in self._lost and held.owner in self._lost:
                held.owner, held.listed = owner, False
                self._adding[fork_id] = owner
                self._send(owner, Verb.ADD, held.rref_id, fork_id)

    def look(self) -> None:
        """Frees the values, and ends the forks, that are unused since an event."""
        while self.unseen:
            found = self.unseen[0]
            owned, held = self._owned.get(found), self._held.get(found)
            if owned and not owned.used:
                self.freed.append(found)
                del self._owned[found]
            if held and not held.handles and not held.children:
                self._send(held.owner, Verb.DELETE, held.rref_id, found, urgent=False)
                del self._held[found]
                self._remember(found)
            self.unseen.popleft()

    def _remember(self, ended: ForkId) -> None:
        self._ended[ended] = None
        if len(self._ended) > _ENDED_REMEMBERED:
            del self._ended[next(iter(self._ended))]

    # -- forks in messages ---------------------------------------------------------------

    def fork(self, fork: Fork, receiver: MemberId) -> None:
        """Notes that a child is put into a message to ``receiver``."""
        if fork.owner == self._own_id:
            self.add(fork.rref_id, fork.fork_id, receiver)
        elif not self._lost & {receiver, fork.owner}:  # else nobody would answer for the child
            parent = self._held[fork.parent_id]
            self._children[fork.fork_id] = fork.parent_id, receiver
            parent.children += 1

    def cancel_fork(self, fork: Fork) -> None:
        """Undoes `fork`: the message is not sent after all."""
        if fork.owner == self._own_id:
            self.unseen.append(fork.rref_id)
            self._owned[fork.rref_id].forks.pop(fork.fork_id, None)
        else:
            self.on_listed(fork.fork_id)

    def receive(self, fork: Fork, sender: MemberId) -> None:
        """Counts a handle for a child that has come in a message from ``sender``.

        If there was no memory for it, nothing is counted, and it can be done again.
        """
        rref_id, fork_id, owner, parent_id = fork
        if owner != self._own_id:
            if fork_id in self._held:
                self._held[fork_id].handles += 1
                return
            if fork_id in self._ended:
                return
            held = Held(rref_id, owner, listed=sender == owner)
            if sender != owner and owner not in self._lost:
                self._send(owner, Verb.ADD, rref_id, fork_id, parent_id)
                self._adding[fork_id] = owner
            self._held[fork_id] = held
            return
        if sender == owner:
            self._delete(rref_id, fork_id, sender)
        else:
            self._announce(rref_id, fork_id, parent_id, sender)
            self._send(sender, Verb.ADDED, rref_id, fork_id, urgent=False)
        self._owned[rref_id].handles += 1

    def begin_when_listed(self, forks: Iterable[ForkId], handler: Handler, deadline: float) -> None:
        """Adds a handler to `ready` once the owners list these forks, which came with its request.

        A message that is lost must not hold it up without limit: see `expire`.
        """
        unlisted = self._adding.keys() & set(forks)
        if unlisted:
            self._waiting.append(_Waiting(handler, unlisted, deadline))
        else:
            self.ready.append(handler)

    def expire(self, now: float) -> None:
        """Adds handlers to `ready` at their deadline, though their forks are not listed.

        Also asks for messages that are late.
        """
        for member, link in self._links.items():
            if link.serials.is_late(now):
                self.on_messages_lost(member)
        for waiting in [each for each in self._waiting if each.deadline <= now]:
            self._waiting.remove(waiting)
            self.ready.append(waiting.handler)

    def _end_adding(self, forks: set[ForkId]) -> None:
        """Notes that the owners of these forks have answered, or never will."""
        for fork_id in forks:
            self._adding.pop(fork_id, None)
        for waiting in list(self._waiting):
            waiting.unlisted -= forks
            if not waiting.unlisted:
                self._waiting.remove(waiting)
                self.ready.append(waiting.handler)

    # -- messages and peers --------------------------------------------------------------

    def handle(self, sender: MemberId, message: ReferenceMessage) -> None:
        """Handles a message of the protocol."""
        verb, serial, rref_id, fork_id, parent_id = message
        if sender in self._lost:
            return
        link = self._links[sender]
        if link.serials.seen(serial):
            return
        if verb is Verb.ADD:
            if parent_id == fork_id:
                self.unmade.append(rref_id)
            self._announce(rref_id, fork_id, parent_id, sender)
            self.add(rref_id, fork_id, sender)
            self._send(sender, Verb.ADDED, rref_id, fork_id)
            if fork_id.created_on != sender and parent_id != NO_FORK:
                self._send(fork_id.created_on, Verb.ADDED, rref_id, fork_id, urgent=False)
        elif verb is Verb.ADDED:
            self.on_listed(fork_id)
        elif verb is Verb.RESEND:
            sent = ReferenceMessage.parse_all(b"".join(link.sent))
            self.outgoing += [(sender, m) for m in sent if m.serial >= fork_id.local_id]
            self.urgent = True
            self._ask_about_forks(sender)
        elif verb is Verb.CHECK:
            if not self._knows(fork_id):
                self._absent[fork_id] = Absent(rref_id, sender, parent_id)
        else:
            self._delete(rref_id, fork_id, sender)
        # Last: if there was no memory for the rest, it is asked for again.
        try:
            link.serials.admit(serial)
        except Exception:  # nor for its frame: it did nothing, and a DELETE must not count twice
            link.serials.admit(serial)

    def on_messages_lost(self, member: MemberId) -> None:
        """Asks a member for its messages again, from the first that has not come."""
        if member not in self._lost:
            missing = ForkId(self._own_id, self._links[member].serials.next)
            self._send(member, Verb.RESEND, NO_FORK, missing)

    def _ask_about_forks(self, member: MemberId) -> None:
        """Asks about the latest forks that were given to a member, and may not have come."""
        given = [
            (fork_id, rref_id, NO_FORK)
            for rref_id, owned in self._owned.items()
            for fork_id, holder in owned.forks.items()
            if holder == member and fork_id.created_on == self._own_id
        ]
        given += [
            (fork_id, self._held[parent_id].rref_id, parent_id)
            for fork_id, (parent_id, receiver) in self._children.items()
            if receiver == member
        ]
        for fork_id, rref_id, parent_id in nlargest(ASKED, given):
            self._links[member].asked.append(fork_id)
            self._send(member, Verb.CHECK, rref_id, fork_id, parent_id)

    def _knows(self, fork_id: ForkId) -> bool:
        """Returns whether a fork has come, and its owner has heard of it or will."""
        return fork_id in self._held or fork_id in self._ended or fork_id in self._adding

    def on_answered(self, member: MemberId) -> None:
        """Notes that all has come, or is lost, that a member had sent before it was asked last."""
        lost = False
        for fork_id, absent in list(self._absent.items()):
            absent.answers += absent.giver == member
            if absent.giver != member or absent.answers < LOST_AFTER_ANSWERS:
                continue
            if not self._knows(fork_id):
                verb = Verb.DELETE if absent.parent_id == NO_FORK else Verb.ADDED
                self._send(member, verb, absent.rref_id, fork_id)
                self._remember(fork_id)
                lost = True
            del self._absent[fork_id]  # last: what there is no memory for is done next time
        if lost:  # there may be more
            self.on_messages_lost(member)

    def on_member_lost(self, member: MemberId) -> None:
        """Ends the forks of a lost member, and waits for nothing from it or sent to it."""
        self._lost.add(member)
        self._links.pop(member, None)
        for fork_id in [f for f, absent in self._absent.items() if absent.giver == member]:
            del self._absent[fork_id]
        self.unseen.extend(self._owned)
        for owned in self._owned.values():
            owned.forget(member)
        self._end_adding({fork for fork, owner in self._adding.items() if owner == member})
        for child, (parent_id, receiver) in list(self._children.items()):
            if member in (receiver, self._held[parent_id].owner):
                self.on_listed(child)

    def _send(
        self,
        to: MemberId,
        verb: Verb,
        rref_id: RRefId,
        fork_id: ForkId,
        parent_id: ForkId = NO_FORK,
        urgent: bool = True,
    ) -> None:
        if to in self._lost:
            return
        self.urgent = self.urgent or urgent
        link = self._links[to]
        message = ReferenceMessage(verb, link.next, rref_id, fork_id, parent_id)
        packed = message.pack()
        self.outgoing.append((to, message))
        link.next += 1
        link.sent.append(packed)

"""RRefs of one agent: the values that it owns, and the messages of the reference count."""

from __future__ import annotations

import itertools
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from functools import partial
from typing import Any

from typing_extensions import override

from zrpc.actors import options_of
from zrpc.agent.agent import Agent
from zrpc.agent.service import ExtensionReader, Handler, Service
from zrpc.calls.cancel_scope import CancelScope, current_scope
from zrpc.calls.execution import RequestJob
from zrpc.calls.function_names import method_in
from zrpc.calls.message_hooks import MessageHooks
from zrpc.calls.result_sink import ResultSink
from zrpc.errors import OwnerDied, has_shut_down, of_lost_message
from zrpc.runtime import garbage_collector
from zrpc.runtime.interrupts import UninterruptedLock
from zrpc.services.actors.actor import ActorSink, in_turn, make_mailbox
from zrpc.services.actors.mailbox import Mailbox, give_up
from zrpc.services.rref.extended import Call, Resolve
from zrpc.services.rref.forks import receive_forks
from zrpc.services.rref.messages import (
    Fork,
    ForkId,
    GloballyUniqueId,
    ReferenceMessage,
    RRefId,
    bodies,
    read_ids,
)
from zrpc.services.rref.protocol import References
from zrpc.services.rref.value import ITSELF, Actor, MethodCheck, OwnedValue, ValueSink
from zrpc.wire.kind import ANSWERS, Kind, Tag
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message

# A handler begins after this time at the latest, even if a fork in its arguments is not listed yet:
# the message that lists it may be lost.
_LISTING_SECONDS = 5.0

_NEVER_MADE = (
    "the value of this RRef is never made on {}: the call that was to make it was not sent, or not "
    "read; or its owner has died, and its maker has no RRef to it any more, or it was stopped, or "
    "it has a name, and its constructor has failed since"
)

# A worker remembers this many of the values that it has freed: the caller of a method may give
# up its call, and then its RRef, before the call arrives.
_FREED_REMEMBERED = 4096

# Messages that nobody waits for gather for this time, as long as others come in. In a chain of
# calls with RRefs, two of four messages are such ones.
_GATHER_SECONDS = 0.001


class RRefService(Service, MessageHooks):
    """Plugs RRefs into an agent.

    Args:
        agent: the agent.
        make_handle: makes the handle of a fork that has arrived; it is given the value if this
            worker is the owner.

    Attributes:
        caller: the agent's.
        member: this worker.
        lock: guards the references and the values. Nothing is sent and no user code runs under it.
        references: this worker's part in the reference count; see `settle_references`.
        values: those that this worker owns. A message about a value may precede the call that
            makes it.
        busy: the mailboxes of actors that have calls, and perhaps some more; copied to be read.
        dropped: handles that have ended: the value's id, and the fork's id or None for one of
            the owner's; and forks whose message is not sent after all. Finalizers append to it, in
            any thread and at any moment, even inside of a locked section; so they do nothing else,
            and the I/O thread does the rest.
    """

    tag = Tag.FORKS

    def __init__(
        self, agent: Agent, make_handle: Callable[[RRefService, Fork, OwnedValue | None], Any]
    ) -> None:
        super().__init__(agent)
        self.caller = agent.caller
        self.make_handle = make_handle
        self.member = agent.worker_info.member_id
        self.dropped: deque[tuple[RRefId, ForkId | None] | Fork] = deque()
        self._local_ids = itertools.count()
        self.lock = UninterruptedLock()
        self.references = References(self.member)
        self.values: defaultdict[RRefId, OwnedValue] = defaultdict(OwnedValue)
        # Each as one number: objects would take the collector's time.
        self._freed: deque[int] = deque(maxlen=_FREED_REMEMBERED)
        self._unmade: deque[OwnedValue] = deque()  # those that get an error now
        self._send_at = 0.0  # when to send what has gathered; 0 if that is not known yet
        self._closed = False
        # Its actors, by the ids of the objects; guarded by the lock.
        self._actors: weakref.WeakValueDictionary[int, Actor] = weakref.WeakValueDictionary()
        self._mailboxes: weakref.WeakSet[Mailbox] = weakref.WeakSet()
        self.busy: set[Mailbox] = set()
        self._actor_sink = ActorSink(agent.callee)

    @override
    def handlers(self) -> Mapping[Kind, Handler]:
        return {
            Kind.REMOTE: self._on_remote,
            Kind.FETCH: self._on_fetch,
            Kind.METHOD: partial(self.run_method, sink=self.agent.callee),
            Kind.REFERENCE: self._on_reference,
        }

    @override
    def extension_readers(self) -> Mapping[Tag, ExtensionReader]:
        # For SUBJECT: the value asked for, for REMOTE the new value and its creator's fork. Last
        # the place in the order of the calls to an actor.
        return {Tag.FORKS: partial(receive_forks, self), Tag.SUBJECT: read_ids}

    @override
    def message_hooks(self) -> MessageHooks:
        return self

    def new_id(self) -> GloballyUniqueId:
        """Returns an id that is unique in the mesh, of a new RRef or fork.

        Raises:
            RpcError: in a finalizer that has interrupted zrpc, see `garbage_collector`.
        """
        if garbage_collector.running:
            garbage_collector.check("make an RRef")
        return GloballyUniqueId(self.member, next(self._local_ids))

    # -- handles -------------------------------------------------------------------------

    def retain_value(self, rref_id: RRefId) -> OwnedValue:
        """Counts a new handle at the owner; returns its value."""
        with self.lock:
            self.references.retain(rref_id)
            return self.values[rref_id]

    def is_confirmed(self, fork_id: ForkId) -> bool:
        """Returns whether the owner lists a fork of ours."""
        with self.lock:
            return self.references.is_listed(fork_id)

    def adopt(self, owned: OwnedValue, value: Any, scope: CancelScope | None = None) -> None:
        """Makes an actor of a value if its class is marked, or what has made it; or it is one.

        Args:
            owned: is about to get the value.
            value: the value.
            scope: of the call that has made it; None if the program makes an RRef to it.
        """
        own: list[OwnedValue] = []  # that its constructor has made, before what it is was known
        if scope is not None:
            own = [each for each in scope.early if each.holds(value)]
        elif (outer := current_scope()) is not None and options_of(outer.function) is not None:
            outer.early = *outer.early, owned
        made, options = None, options_of(scope and scope.function, value)
        with self.lock:
            actor = self._actors.get(id(value))
            if options is not None and (own or actor is None):
                made = make_mailbox(self.agent, options, owned.name, self.busy)
            if actor is None and made is not None:
                actor = self._actors[id(value)] = Actor(value, made)
                self._mailboxes.add(made)
        if actor is None:
            return
        if made is not None:
            actor.made_as = owned.rref_id
        for each in (owned, *own):
            each.share(actor)
        if made is not None and made is not actor.mailbox:
            actor.mailbox.do(actor.mailbox.become(made))

    def mailboxes(self) -> list[Mailbox]:
        """Returns those of the actors that this worker owns."""
        with self.lock:
            return list(self._mailboxes)

    # -- the handlers, in the I/O thread -------------------------------------------------

    def _on_remote(self, request: Message) -> None:
        rref_id, fork_id, *subject = request.attachment(Tag.SUBJECT)
        with self.lock:
            if request.sender == self.member:
                # The value no longer exists if the call has timed out and the handle is gone.
                value = self.values.get(rref_id) or OwnedValue()
            else:
                value = self.values[rref_id]
                self.references.add(rref_id, fork_id, request.sender)
            value.begun, value.rref_id = True, rref_id
        self.settle_references()
        sink = ValueSink(self.agent.callee, value, self.adopt)
        if subject:
            self.run_method(request, sink, subject=subject)
        else:
            self.agent.callee.on_call(request, sink)

    def _on_fetch(self, request: Message) -> None:
        rref_id, *turn = request.attachment(Tag.SUBJECT)
        value = self.find_value(rref_id)
        begin = partial(self._fetch, request, value, turn)
        value.when_ready(begin, self.agent.callee.requests.accept(request))

    def _fetch(self, request: Message, value: OwnedValue, turn: Sequence[tuple[int, int]]) -> None:
        """Answers with a copy of a value that is there: if it is an actor's, in its turn."""
        mailbox, callee = value.mailbox, self.agent.callee
        sink: ResultSink = callee if mailbox is None else self._actor_sink
        job = RequestJob(request, sink.fail, partial(value.answer, sink))
        begin = partial(self.agent.receiver.run, job)
        if mailbox is None:
            begin()
            return
        request.scope.mailbox = mailbox
        call = request, begin, partial(callee.refuse, request)
        mailbox.do(mailbox.arrive(call, request.sender, turn[0] if turn else None))

    def run_method(
        self,
        request: Message,
        sink: ResultSink,
        wrap: Callable[[Resolve], Call] | None = None,
        subject: Sequence[RRefId] = (),
    ) -> None:
        """Runs a method of the value that a request is about. In the I/O thread.

        Args:
            request: the request.
            sink: takes the outcome.
            wrap: returns what runs instead; it is given what returns the method and its arguments.
            subject: the value, and the call's place in the order of an actor's; by default as the
                request says. If that was dropped meanwhile, it says nothing any longer.
        """
        rref_id, *turn = subject or request.attachment(Tag.SUBJECT)
        value = self.find_value(rref_id)
        scope = request.scope or self.agent.callee.requests.accept(request)
        resolve: Resolve = partial(self._resolve_method, request, value)
        if wrap is not None:
            resolve = partial(wrap, resolve)
        ready = value.ready  # before the mailbox, which is set first: else one may be overlooked
        mailbox = value.mailbox
        if mailbox is not None:
            own = self._actor_sink if sink is self.agent.callee else ActorSink(sink)
            begin = partial(self.agent.callee.on_call, request, own, resolve)
            scope.mailbox = mailbox
            method = method_in(request.body) if mailbox.beside else ""
            call = request, begin, partial(sink.refuse, request)
            place = turn[0] if turn else None
            for each in mailbox.arrive(call, request.sender, place, method):
                try:  # as `do`, without its step
                    each[1]()
                except Exception as error:
                    give_up(each, error)
            return
        begin = partial(self.agent.callee.on_call, request, sink, resolve)
        if not ready:  # it may become an actor
            begin = partial(self.run_method, request, sink, wrap, [rref_id, *turn])
        # No thread waits for a value that is still to be made.
        value.when_ready(begin, scope)

    def _resolve_method(self, request: Message, value: OwnedValue) -> Call:
        name, args, kwargs = self.agent.codec.unpack(request)
        content = value.get()
        if args is None:  # it asks whether there is such a method
            return MethodCheck(name), (content,), {}
        method = content if name == ITSELF else getattr(content, name)
        if value.mailbox is not None and value.mailbox.concurrency > 1:
            method = in_turn(value.mailbox, request, method)
        return method, args, kwargs

    def _on_reference(self, message: Message) -> None:
        with self.lock:
            for each in ReferenceMessage.parse_all(message.body):
                self.references.handle(message.sender, each)
        self.settle_references()

    @override
    def when_ready(self, request: Message, begin: Callable[[], None]) -> None:
        # Nothing is left of a request that was dropped meanwhile; then its handler never begins.
        received = (request.attachments or {}).get(Tag.FORKS, ())
        deadline = time.monotonic() + _LISTING_SECONDS
        with self.lock:
            forks = [fork for fork, _ in received]
            self.references.begin_when_listed(forks, (request, begin), deadline)
        self.settle_references()

    # -- events of the agent -------------------------------------------------------------

    @override
    def on_member_lost(self, member: MemberId) -> None:
        with self.lock:
            self.references.on_member_lost(member)
            values = self.values.items()
            orphans = [(i, each) for i, each in values if i.created_on == member and not each.begun]
        for rref_id, value in orphans:
            value.set(error=self._orphaned(rref_id))
        self.settle_references()

    @override
    def on_messages_lost(self, member: MemberId) -> None:
        with self.lock:
            self.references.on_messages_lost(member)
        self.settle_references()

    @override
    def on_unhandled(self, message: Message) -> None:
        if message.kind in ANSWERS:  # its RRefs were given by its sender, which is not told
            self.on_messages_lost(message.sender)

    @override
    def on_answered(self, member: MemberId) -> None:
        with self.lock:
            self.references.on_answered(member)
        self.settle_references()

    @override
    def awaited_members(self) -> Collection[MemberId]:
        with self.lock:
            return self.references.awaited

    @override
    def stats(self) -> Mapping[str, int]:
        with self.lock:
            owned, held = self.references.sizes()
        return {"rrefs_owned": owned, "rrefs_held": held}

    @override
    def tick(self) -> None:
        with self.lock:
            self.references.expire(time.monotonic())
        self.settle_references()
        self._send_references()

    @override
    def idle(self) -> bool:
        with self.lock:
            references = self.references
            return references.idle and not references.outgoing and not self.dropped

    @override
    def after_turn(self) -> Sequence[tuple[Sized, Callable[[], None]]]:
        gathered = self.references.outgoing
        return [(self.dropped, self._release_dropped), (gathered, self._send_gathered)]

    def _release_dropped(self) -> None:
        with self.lock:
            while self.dropped:
                each = self.dropped[0]
                if isinstance(each, Fork):
                    self.references.cancel_fork(each)
                elif each[1] is None:
                    self.references.release(each[0])
                else:
                    self.references.drop(each[1])
                self.dropped.popleft()  # last: what there is no memory for is done later
        self.settle_references()

    @override
    def close(self) -> None:
        self._closed = True
        with self.lock:
            values, self.values = self.values, defaultdict(OwnedValue)
        for value in values.values():
            value.set(error=has_shut_down())  # threads may wait for one that is still to be made

    # -- values and references -----------------------------------------------------------

    def find_value(self, rref_id: RRefId) -> OwnedValue:
        """Returns the value that a message is about; a failed one if it is known to be freed."""
        if (found := self.values.get(rref_id)) is not None:  # the usual case, without the lock
            return found
        creator = rref_id.created_on
        with self.lock:
            membership = self.agent.membership
            lost = creator in membership.lost
            gone = creator == self.member or lost or creator not in membership.infos
            if rref_id in self.values or not (gone or _number(rref_id) in self._freed):
                return self.values[rref_id]
        what = f"the value of {rref_id} is no longer here"
        value = OwnedValue()
        value.set(error=self._orphaned(rref_id) if lost else of_lost_message(what, False))
        return value

    def _orphaned(self, rref_id: RRefId) -> OwnerDied:
        """Returns the error of a value that is not here, and whose creator is lost."""
        why = self.agent.why_gone(rref_id.created_on)
        error = OwnerDied(f"the value of {rref_id} is not here: {why}; it had asked for the value")
        error.executed = False
        return error

    def settle_references(self) -> None:
        """Frees unused values, sends messages that somebody waits for, and lets handlers begin.

        What there is no memory for is done by the next call, at the next tick at the latest.
        """
        references, unmade = self.references, self._unmade
        if not (
            references.unseen or references.freed or references.urgent or references.ready or unmade
        ):
            return  # if another thread adds something meanwhile, it settles that itself
        with self.lock:
            references.look()
            # Before those that are freed: one may be both.
            unmade.extend(map(self.values.__getitem__, references.unmade))
            references.unmade.clear()
            self._freed.extend(map(_number, references.freed))
            freed = [*map(self.values.pop, references.freed, itertools.repeat(None))]
            references.freed.clear()
        while unmade:
            try:
                value = unmade.popleft()
            except IndexError:  # another thread has taken it
                break
            try:
                why = _NEVER_MADE.format(self.agent.worker_info.name)
                value.set(error=of_lost_message(why, executed=False))
            except BaseException:
                unmade.append(value)
                raise
        if freed and not self._closed:
            # A value's finalizer is the user's code, so it runs in the pool.
            self.agent.receiver.run(freed.clear)
        if references.urgent:
            self._send_references()
        while references.ready:
            try:
                request, begin = references.ready.pop(0)  # atomic
            except IndexError:  # another thread has taken it
                return
            try:
                begin()
            except BaseException as error:
                self.agent.callee.answer_error(request, error)
                raise

    def _send_gathered(self) -> None:
        """Sends what has gathered for `_GATHER_SECONDS`; the next tick sends all of it."""
        now = time.monotonic()
        self._send_at = self._send_at or now + _GATHER_SECONDS
        if now >= self._send_at:
            self._send_references()

    def _send_references(self) -> None:
        with self.lock:
            outgoing = self.references.outgoing.copy()
            self.references.outgoing.clear()
            self.references.urgent, self._send_at = False, 0.0
        try:
            for member, body in bodies(outgoing):
                self.agent.outbox.post(member, Message(Kind.REFERENCE, body=body))
        except BaseException:  # what was sent comes again, and is not counted twice
            with self.lock:
                self.references.outgoing[:0] = outgoing
                self.references.urgent = True
            raise


def _number(rref_id: RRefId) -> int:
    return rref_id.created_on << 64 | rref_id.local_id

"""RRefs of one agent: the values that it owns, and the messages of the reference count."""

from __future__ import annotations

import itertools
import struct
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from functools import partial
from typing import TYPE_CHECKING, Any

from zrpc.agent.agent import Agent
from zrpc.agent.service import ExtensionReader, Handler, Service
from zrpc.calls.callee import UNCALLED
from zrpc.calls.execution import RequestJob, ResultSink
from zrpc.calls.message_hooks import MessageHooks
from zrpc.errors import OwnerDied, RpcError, has_shut_down, was_not_executed
from zrpc.membership.worker_info import WorkerInfo
from zrpc.runtime.interrupts import UninterruptedLock
from zrpc.services.rref.creation import Creation, ValueSink
from zrpc.services.rref.messages import Fork, ForkId, GloballyUniqueId, ReferenceMessage, RRefId
from zrpc.services.rref.protocol import References
from zrpc.services.rref.value import MethodCheck, OwnedValue
from zrpc.wire.kind import Kind, Tag
from zrpc.wire.member_id import MemberId
from zrpc.wire.message import Message

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from zrpc.services.rref.rref import RRef

__all__ = ["BackwardOfValue", "RRefService"]

# At most this many reference messages are sent as one: its receiver does nothing else meanwhile.
_MAX_BATCH_LENGTH = 256

# A handler begins after this time at the latest, even if a fork in its arguments is not listed yet:
# the message that lists it may be lost.
_LISTING_SECONDS = 5.0

# A worker remembers this many of the values that it has freed: the caller of a method may give
# up its call, and then its RRef, before the call arrives.
_FREED_REMEMBERED = 4096

# For SUBJECT: the value asked for, and for REMOTE the new value and its creator's fork.
_ID = struct.Struct("<IQ")


class BackwardOfValue(ABC):
    """A service of the same agent that runs backward passes from the value of an RRef."""

    @abstractmethod
    def backward_of_value(
        self, owner: WorkerInfo, rref: Any, context_id: int, retain_graph: bool
    ) -> None:
        """Runs a backward pass from the value of an RRef; see `RRef.backward`."""


class ListedFirst(MessageHooks):
    """Lets a handler begin once the owners have listed the forks in its arguments."""

    tag = Tag.FORKS

    def __init__(self, service: RRefService) -> None:
        self._service = service

    def when_ready(self, request: Message, begin: Callable[[], None]) -> None:
        """Calls ``begin()`` when the handler of a request may begin. In the I/O thread."""
        self._service.begin_when_listed(request, begin)


class RRefService(Service):
    """Plugs RRefs into an agent.

    Args:
        agent: the agent.
        make_handle: makes the handle of a fork that has arrived; it is given the value if this
            worker is the owner.

    Attributes:
        dropped: handles that have ended: the value's id, and the fork's id or None for one of
            the owner's. Finalizers append to it, in any thread and at any moment, even inside
            of a locked section; so they do nothing else, and the I/O thread does the rest.
    """

    def __init__(
        self, agent: Agent, make_handle: Callable[[RRefService, Fork, OwnedValue | None], Any]
    ) -> None:
        super().__init__(agent)
        self.caller = agent.caller
        self._make_handle = make_handle
        self.member = agent.worker_info.member_id
        self.dropped: deque[tuple[RRefId, ForkId | None]] = deque()
        self._local_ids = itertools.count()
        # Guards the two that follow. Nothing is sent and no user code runs under it.
        self._lock = UninterruptedLock()
        self._references = References(self.member)
        # A message about a value may come before the call that makes it.
        self._values: defaultdict[RRefId, OwnedValue] = defaultdict(OwnedValue)
        self._freed: dict[int, None] = {}  # the latest ones, each as one number
        self._closed = False

    def handlers(self) -> Mapping[Kind, Handler]:
        """Returns the handlers of requests about values, and of the reference count."""
        return {
            Kind.REMOTE: self._on_remote,
            Kind.FETCH: self._on_fetch,
            Kind.METHOD: self._on_method,
            Kind.REFERENCE: self._on_reference,
        }

    def extension_readers(self) -> Mapping[Tag, ExtensionReader]:
        """Returns what makes the handles of a message, and what reads which values it is about."""
        return {
            Tag.FORKS: self._receive_forks,
            Tag.SUBJECT: lambda _, data: [GloballyUniqueId(*row) for row in _ID.iter_unpack(data)],
        }

    def message_hooks(self) -> MessageHooks:
        """Returns what lets handlers begin."""
        return ListedFirst(self)

    def new_id(self) -> GloballyUniqueId:
        """Returns an id that is unique in the mesh."""
        return GloballyUniqueId(self.member, next(self._local_ids))

    # -- handles -------------------------------------------------------------------------

    def retain_value(self, rref_id: RRefId) -> OwnedValue:
        """Counts a new handle at the owner; returns its value."""
        with self._lock:
            self._references.retain(rref_id)
            return self._values[rref_id]

    def is_confirmed(self, fork_id: ForkId) -> bool:
        """Returns whether the owner lists a fork of ours."""
        with self._lock:
            return self._references.is_listed(fork_id)

    def fork(self, rref_id: RRefId, parent: ForkId | None, owner: MemberId, to: MemberId) -> Fork:
        """Makes a child of a handle, for a message to the worker ``to``."""
        fork = Fork(rref_id, self.new_id(), owner, *([] if parent is None else [parent]))
        with self._lock:
            self._references.fork(fork, parent, to)
        return fork

    def cancel_fork(self, fork: Fork) -> None:
        """Undoes `fork`: the message with the child is not sent."""
        with self._lock:
            self._references.cancel_fork(fork)
        self._send_outgoing()

    # -- requests to the owner -----------------------------------------------------------

    def create(
        self,
        creation: Creation,
        owner: WorkerInfo,
        body: Any,
        timeout: float,
        subject: RRef[Any] | None,
    ) -> OwnedValue | None:
        """Has a value made by a call of a function, or of a method of the value of ``subject``.

        The body is the function (or the method's name), args and kwargs. The handle gets the error
        if the call fails, but not what the function raises. Returns the value if this worker is
        the owner. If this raises, the handle is dropped already: its error may be kept for long.
        """
        rref_id, fork_id = creation.rref_id, creation.fork_id
        # The owner has no fork, but the message has room for one.
        ids = [rref_id, fork_id or rref_id, *([] if subject is None else [subject._rref_id])]
        value = None
        try:
            with self._lock:
                if fork_id is None:
                    self._references.retain(rref_id)  # for the handle
                    creation.retains = True
                    self._references.retain(rref_id)  # for the call, which may outlive it
                    value = self._values[rref_id]
                else:
                    self._references.create(rref_id, fork_id, owner.member_id)
            self.caller.call_notify(
                owner,
                Kind.REMOTE,
                body,
                timeout,
                self.subject_extension(*ids),
                creation,
                holds=subject,  # its end must not overtake the call
                undo=creation.on_not_made,
            )
        except BaseException:
            for call in self.caller.calls.in_flight():
                if call.follower is creation:  # Ctrl-C came as soon as it was sent
                    call.cancel()
            if fork_id is None:
                self.release_creation(creation)  # it has done so itself if the call was settled
            elif creation.unmade or not creation.settled:
                with self._lock:
                    self._references.cancel_create(fork_id)
            else:  # the owner hears of the fork, and then of its end
                creation.issued = True
            self.dropped.append((rref_id, fork_id))
            raise
        creation.issued = True
        # After that: `on_not_made` does it the other way round.
        if creation.unmade:
            self._report_unmade(creation)
        return value

    def on_created(self, fork_id: ForkId) -> None:
        """Notes that the owner lists a fork of ours, which was made with its value."""
        with self._lock:
            self._references.on_listed(fork_id)

    def on_not_made(self, creation: Creation) -> None:
        """Notes that the message that makes a value never comes to its owner."""
        creation.unmade = True
        if creation.issued:
            self._report_unmade(creation)

    def _report_unmade(self, creation: Creation) -> None:
        """Tells the owner, once, that there will be no value: others may have a fork by now."""
        assert creation.fork_id is not None
        with self._lock:
            known, creation.reported = creation.reported, True
            if not known:
                self._references.on_not_made(creation.rref_id, creation.fork_id, creation.owner)
        self._settle_references()

    def release_creation(self, creation: Creation) -> None:
        """Drops, once, the handle that a call counts as while it makes a value here."""
        with self._lock:
            retained, creation.retains = creation.retains, False
        if retained:
            self.dropped.append((creation.rref_id, None))

    def subject_extension(self, *ids: GloballyUniqueId) -> tuple[int, bytes]:
        """Returns the extension of a message that is about a value."""
        return Tag.SUBJECT, b"".join(_ID.pack(*i) for i in ids)

    def check_owner(self, owner: WorkerInfo) -> None:
        """Raises OwnerDied if the owner of a value is lost."""
        if owner.member_id in self.agent.membership.lost:
            error = OwnerDied(
                f"{self.agent.why_gone(owner.member_id)}; it owned the value of this RRef, which "
                "is lost with it: make it again on a worker that lives"
            )
            error.executed = False  # it is not called at all
            raise error

    # -- the handlers, in the I/O thread -------------------------------------------------

    def _on_remote(self, request: Message) -> None:
        rref_id, fork_id, *subject = request.attachment(Tag.SUBJECT)
        with self._lock:
            if request.sender == self.member:
                # The value no longer exists if the call has timed out and the handle is gone.
                value = self._values.get(rref_id) or OwnedValue()
            else:
                value = self._values[rref_id]
                self._references.add(rref_id, fork_id, request.sender)
            value.begun = True
        self._settle_references()
        sink = ValueSink(self.agent.callee, request, value)
        if subject:
            self._run_method(request, self._find_value(subject[0]), sink)
        else:
            self.agent.callee.execute(request, sink, partial(self.agent.codec.unpack, request))

    def _on_fetch(self, request: Message) -> None:
        value = self._find_value(*request.attachment(Tag.SUBJECT))
        scope = self.agent.callee.accept(request)
        answer = RequestJob(request, partial(self._answer_fetch, value))
        value.when_ready(partial(self.agent.receiver.run, answer), scope)

    def _answer_fetch(self, value: OwnedValue, request: Message) -> None:
        """Answers a fetch; in the pool, as pickling may take long and run the user's code."""
        try:
            content = value.get()
        except BaseException as error:
            uncalled = UNCALLED if was_not_executed(error) else ()
            self.agent.callee.answer_error(request, error, uncalled)
        else:
            self.agent.callee.answer(request, content)

    def _on_method(self, request: Message) -> None:
        value = self._find_value(*request.attachment(Tag.SUBJECT))
        self._run_method(request, value, self.agent.callee.sink_for(request))

    def _run_method(self, request: Message, value: OwnedValue, sink: ResultSink) -> None:
        def resolve() -> tuple[Any, Any, Any]:
            name, args, kwargs = self.agent.codec.unpack(request)
            method = value.method(name)
            if args is None:  # it asks whether there is such a method
                return MethodCheck(name), (method,), {}
            return method, args, kwargs

        # No thread waits for a value that is still to be made.
        scope = self.agent.callee.accept(request)
        value.when_ready(lambda: self.agent.callee.execute(request, sink, resolve), scope)

    def _on_reference(self, message: Message) -> None:
        sender, batch = message.sender, ReferenceMessage.parse_all(message.body)
        with self._lock:
            for each in batch:
                self._references.handle(sender, each)
        self._settle_references()

    def _receive_forks(self, message: Message, data: bytes) -> list[Any]:
        """Makes the handles of a message, even if it will never be unpickled."""
        handles = []
        forks = Fork.unpack_all(data)
        for fork in forks:
            if fork.owner not in self.agent.membership.infos:
                self.agent.peers.recall(fork.owner)
        with self._lock:
            for fork in forks:
                self._references.receive(fork, message.sender)
                value = self._values[fork.rref_id] if fork.owner == self.member else None
                handles.append((fork, value))
        self._settle_references()
        return [self._make_handle(self, fork, value) for fork, value in handles]

    def begin_when_listed(self, request: Message, begin: Callable[[], None]) -> None:
        """Calls ``begin()`` when the owners have listed the forks that came with a request."""
        # Nothing is left of a request that was dropped just now; then its handler does not begin.
        handles: list[RRef[Any]] = (request.attachments or {}).get(Tag.FORKS, [])
        forks = [rref._fork_id for rref in handles if rref._fork_id is not None]
        with self._lock:
            deadline = time.monotonic() + _LISTING_SECONDS
            self._references.begin_when_listed(forks, begin, deadline)
        self._settle_references()

    # -- events of the agent -------------------------------------------------------------

    def on_member_lost(self, member: MemberId) -> None:
        """Ends what a lost member held, and fails the values that it was about to have made."""
        with self._lock:
            self._references.on_member_lost(member)
            orphans = [
                value
                for rref_id, value in self._values.items()
                if rref_id.created_on == member and not value.begun
            ]
        for value in orphans:
            value.set(error=OwnerDied("the worker that asked for this value died before it did"))
        self._settle_references()

    def stats(self) -> Mapping[str, int]:
        """Returns how many values this worker owns, and how many it refers to."""
        with self._lock:
            owned, held = self._references.sizes()
        return {"rrefs_owned": owned, "rrefs_held": held}

    def tick(self) -> None:
        """Has handlers begin that have waited for long."""
        with self._lock:
            self._references.expire(time.monotonic())
        self._settle_references()

    def idle(self) -> bool:
        """Returns whether this worker has no message of the reference count outstanding."""
        with self._lock:
            return self._references.idle and not self.dropped

    def after_turn(self) -> None:
        """Counts the handles that finalizers have noted, and tells the owners."""
        if not self.dropped:
            return
        with self._lock:
            while self.dropped:
                rref_id, fork_id = self.dropped.popleft()
                if fork_id is None:
                    self._references.release(rref_id)
                else:
                    self._references.drop(fork_id)
        self._settle_references()

    def close(self) -> None:
        """Frees all values; nothing can be sent any more."""
        self._closed = True
        with self._lock:
            values, self._values = self._values, defaultdict(OwnedValue)
        for value in values.values():
            value.set(error=has_shut_down())  # threads may wait for one that is still to be made
        values.clear()

    # -- values and references -----------------------------------------------------------

    def _find_value(self, rref_id: RRefId) -> OwnedValue:
        """Returns the value that a message is about; a failed one if it is known to be freed."""
        creator = rref_id.created_on
        with self._lock:
            gone = creator == self.member or creator in self.agent.membership.lost
            gone = gone or _number(rref_id) in self._freed
            if rref_id in self._values or not gone:
                return self._values[rref_id]
        value = OwnedValue()
        value.set(error=RpcError(f"the value of {rref_id} is no longer here"))
        return value

    def _settle_references(self) -> None:
        """Frees unused values, sends the messages that have gathered, and has handlers begin."""
        references = self._references
        if not (references.freed or references.outgoing or references.ready):
            return  # if another thread adds something just now, it settles that itself
        with self._lock:
            ready, references.ready = references.ready, []
            # Before those that are freed: one may be both.
            unmade = [self._values[rref_id] for rref_id in references.unmade]
            references.unmade.clear()
            freed = [self._values.pop(i, None) for i in self._references.freed]
            self._freed.update(dict.fromkeys(map(_number, self._references.freed)))
            while len(self._freed) > _FREED_REMEMBERED:
                del self._freed[next(iter(self._freed))]
            self._references.freed.clear()
        for value in unmade:
            value.set(
                error=RpcError(
                    "the value of this RRef is never made: the call that was to make it was not "
                    "sent, or its owner could not read it"
                )
            )
        if freed and not self._closed:
            # A value's finalizer is the user's code, so it runs in the pool.
            self.agent.receiver.run(freed.clear)
        self._send_outgoing()
        for begin in ready:
            begin()

    def _send_outgoing(self) -> None:
        with self._lock:
            outgoing, self._references.outgoing = self._references.outgoing, []
        packed: dict[MemberId, list[bytes]] = {}
        for member, message in outgoing:
            packed.setdefault(member, []).append(message.pack())
        for member, messages in packed.items():
            for start in range(0, len(messages), _MAX_BATCH_LENGTH):
                body = b"".join(messages[start : start + _MAX_BATCH_LENGTH])
                self.agent.outbox.post(member, Message(Kind.REFERENCE, body=body))


def _number(rref_id: RRefId) -> int:
    """Returns an id as one number, which takes a third of the memory."""
    return rref_id.created_on << 64 | rref_id.local_id

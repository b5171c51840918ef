"""RRefs of one agent: the values that it owns, and the reference count's messages."""

from __future__ import annotations

import itertools
import struct
import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from zrpc.agent import Agent
from zrpc.errors import OwnerDied, RpcError
from zrpc.rref.ids import ForkId, GloballyUniqueId, RRefId
from zrpc.rref.protocol import Fork, ReferenceMessage, References
from zrpc.rref.value import OwnedValue
from zrpc.wire.header import Message
from zrpc.wire.kind import Kind
from zrpc.worker_info import WorkerInfo

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable

    from zrpc.calls import PendingCall

__all__ = ["FORKS", "Handle", "RRefLayer", "layer_of"]

# The tag of the extension that lists the forks in a message, and of the one that names the
# RRef that a message is about.
FORKS = 1
SUBJECT = 2

# So many messages of the reference count travel in one: the receiver does nothing else meanwhile.
_MOST_IN_ONE = 256

# For SUBJECT: the value asked for, and for REMOTE the new value and its creator's fork.
_ID = struct.Struct("<IQ")


class Handle(Protocol):
    """An RRef, as far as it is known here."""

    def fail(self, error: Exception) -> None:
        """The call that was to make the value has failed; in any thread."""


class RRefLayer:
    """Plugs RRefs into an agent.

    Args:
        agent: the agent; this layer registers its handlers there.
        make_handle: makes the handle of a fork that has arrived; the value is given where this
            worker is the owner.

    Attributes:
        agent: the agent.
        dropped: handles that have ended: the value's id, and the fork's id or None for one of
            the owner's. Finalizers append to it, in any thread and at any moment, even inside
            of a locked section; so they do nothing else, and the I/O thread does the rest.
        backward: goes backward from a value; set by the layer of autograd.
    """

    backward: Callable[[WorkerInfo, Any, int, bool], None]

    def __init__(
        self, agent: Agent, make_handle: Callable[[RRefLayer, Fork, OwnedValue | None], Any]
    ) -> None:
        self.agent = agent
        self._make_handle = make_handle
        self.rank = agent.worker_info.number
        self.dropped: deque[tuple[RRefId, ForkId | None]] = deque()
        self._numbers = itertools.count()
        # Guards the two that follow. Nothing is sent and no user code runs under it.
        self._lock = threading.Lock()
        self._references = References(self.rank)
        self._values: dict[RRefId, OwnedValue] = {}
        self._closed = False
        agent.dispatcher.register(Kind.REMOTE, self._on_remote)
        agent.dispatcher.register(Kind.FETCH, self._on_fetch)
        agent.dispatcher.register(Kind.METHOD, self._on_method)
        agent.dispatcher.register(Kind.REFERENCE, self._on_reference)
        agent.flushers.append(self._flush)
        agent.dispatcher.register_extension(FORKS, self._receive_forks)
        agent.dispatcher.register_extension(SUBJECT, lambda _, data: _unpack_ids(data))

    def new_id(self) -> GloballyUniqueId:
        """An id that nobody else draws."""
        return GloballyUniqueId(self.rank, next(self._numbers))

    # -- handles -------------------------------------------------------------------------

    def own(self, rref_id: RRefId) -> OwnedValue:
        """A handle of the owner's comes to be; returns the value that it is for."""
        with self._lock:
            self._references.hold(rref_id)
            return self._value(rref_id)

    def confirmed(self, fork_id: ForkId) -> bool:
        """Whether the owner lists a fork of ours."""
        with self._lock:
            return self._references.listed(fork_id)

    def holders(self, rref_id: RRefId) -> list[WorkerInfo]:
        """The workers that hold an RRef to a value of ours, once for each of their forks."""
        with self._lock:
            ranks = self._references.holders(rref_id)
        return [self.agent.membership.infos[rank] for rank in ranks]

    def hand_on(self, rref_id: RRefId, parent: ForkId | None, owner: int, to: int) -> Fork:
        """Makes a child of a handle, for a message to the worker ``to``."""
        fork = Fork(rref_id, self.new_id(), owner, *([] if parent is None else [parent]))
        with self._lock:
            self._references.fork(fork, parent, to)
        return fork

    def take_back(self, fork: Fork) -> None:
        """The message with that child is not sent."""
        with self._lock:
            self._references.cancel(fork)
        self._send_outgoing()

    # -- asking the owner ----------------------------------------------------------------

    def create(
        self,
        owner: WorkerInfo,
        body: Any,
        timeout: float,
        subject: RRefId | None,
        handle: weakref.ref[Handle],
    ) -> tuple[RRefId, ForkId | None, OwnedValue | None]:
        """Has a value made by a call of a function, or of a method of a value.

        Args:
            owner: where.
            body: function (or the method's name), args, kwargs.
            timeout: seconds; as for any call.
            subject: the value whose method is called.
            handle: told with what the call fails; not with what the function raises.

        Returns:
            The ids of the value and of our fork, and the value. There is no fork where this
            worker is the owner, and no value where it is not.
        """
        rref_id, fork_id = self.new_id(), self.new_id()
        own = owner.number == self.rank
        value = None
        with self._lock:
            if own:
                self._references.hold(rref_id)  # for the handle
                self._references.hold(rref_id)  # for the call, which may outlive it
                value = self._value(rref_id)
            else:
                self._references.create(rref_id, fork_id, owner.number)
        ids = [rref_id, fork_id] if subject is None else [rref_id, fork_id, subject]
        creation = _Creation(self, rref_id, None if own else fork_id, handle)
        try:
            self.agent.caller.call_notify(
                owner, Kind.REMOTE, body, timeout, (SUBJECT, _pack_ids(ids)), creation
            )
        except BaseException:
            with self._lock:
                if own:
                    self._references.release(rref_id)
                else:
                    self._references.forget(fork_id)
            if own:
                creation.release()  # where the call was settled, it has done so
            self._settle_references()
            raise
        return rref_id, None if own else fork_id, value

    def created(self, fork_id: ForkId) -> None:
        """The owner lists a fork of ours, which was made with its value."""
        with self._lock:
            self._references.created(fork_id)

    def subject(self, rref_id: RRefId) -> tuple[int, bytes]:
        """The extension of a message that is about a value."""
        return SUBJECT, _pack_ids([rref_id])

    def check_owner(self, owner: WorkerInfo) -> None:
        """Raises OwnerDied where the owner of a value is gone."""
        if owner.number in self.agent.membership.lost:
            raise OwnerDied(
                f"{self.agent.why_gone(owner.number)}; it owned the value of this RRef, which is "
                "gone with it: make it anew on a worker that lives"
            )

    # -- the handlers, in the I/O thread -------------------------------------------------

    def _on_remote(self, request: Message) -> None:
        rref_id, fork_id, *subject = self._ids(request)
        own = request.sender == self.rank
        with self._lock:
            if own:
                # Not there any more where the call has timed out and the handle is gone.
                value = self._values.get(rref_id) or OwnedValue()
            else:
                value = self._value(rref_id)
                self._references.add(rref_id, fork_id, request.sender)
            value.begun = True
        self._settle_references()
        outlet = _Keep(self, request, value)
        if subject:
            self._run_method(request, self._find(subject[0]), outlet)
        else:
            self.agent.callee.execute(request, outlet, partial(self.agent.codec.unpack, request))

    def _on_fetch(self, request: Message) -> None:
        value = self._find(*self._ids(request))
        self.agent.callee.accept(request)
        value.when_ready(partial(self.agent.run, partial(self._answer_fetch, request, value)))

    def _answer_fetch(self, request: Message, value: OwnedValue) -> None:
        """In the pool: pickling may take long, and runs what users wrote."""
        try:
            content = value.get()
        except BaseException as error:
            self.agent.callee.answer_error(request, error)
        else:
            self.agent.callee.answer(request, content)

    def _on_method(self, request: Message) -> None:
        value = self._find(*self._ids(request))
        self._run_method(request, value, self.agent.callee.answering(request))

    def _run_method(self, request: Message, value: OwnedValue, outlet: Any) -> None:
        def resolve() -> tuple[Any, Any, Any]:
            name, args, kwargs = self.agent.codec.unpack(request)
            return getattr(value.get(), name), args, kwargs

        # No thread waits for a value that is still to come.
        self.agent.callee.accept(request)
        value.when_ready(lambda: self.agent.callee.execute(request, outlet, resolve))

    def _on_reference(self, message: Message) -> None:
        sender, words = message.sender, ReferenceMessage.parse_all(message.body)
        with self._lock:
            for word in words:
                self._references.handle(sender, word)
        self._settle_references()

    def _receive_forks(self, message: Message, data: bytes) -> list[Any]:
        """Makes the handles of a message, even where nobody will unpickle it."""
        handles = []
        forks = Fork.unpack_all(data)
        for fork in forks:
            if fork.owner not in self.agent.membership.infos:
                self.agent.recall(fork.owner)
        with self._lock:
            for fork in forks:
                self._references.receive(fork, message.sender)
                value = self._value(fork.rref_id) if fork.owner == self.rank else None
                handles.append((fork, value))
        self._settle_references()
        return [self._make_handle(self, fork, value) for fork, value in handles]

    # -- the layer -----------------------------------------------------------------------

    def lose(self, rank: int) -> None:
        """A peer is gone."""
        with self._lock:
            self._references.lose(rank)
            orphans = [
                value
                for rref_id, value in self._values.items()
                if rref_id.created_on == rank and not value.begun
            ]
        for value in orphans:
            value.set(error=OwnerDied("the worker that asked for this value died before it did"))
        self._settle_references()

    def quiet(self) -> bool:
        """Whether no message of the reference count is under way on our part."""
        with self._lock:
            return self._references.quiet and not self.dropped

    def _flush(self) -> None:
        """Tells the owners what finalizers have noted."""
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
            values, self._values = self._values, {}
        values.clear()

    # -- inside --------------------------------------------------------------------------

    def _value(self, rref_id: RRefId) -> OwnedValue:
        """The value of an id, made where it is the first that is heard of it; under the lock."""
        value = self._values.get(rref_id)
        if value is None:
            value = self._values[rref_id] = OwnedValue()
        return value

    def _find(self, rref_id: RRefId) -> OwnedValue:
        """The value that a message is about; a failed one where it is known to be gone."""
        creator = rref_id.created_on
        with self._lock:
            gone = creator == self.rank or creator in self.agent.membership.lost
            if rref_id in self._values or not gone:
                return self._value(rref_id)
        value = OwnedValue()
        value.set(error=RpcError(f"the value of {rref_id} is not here any more"))
        return value

    def _ids(self, message: Message) -> list[GloballyUniqueId]:
        ids: list[GloballyUniqueId] = message.attachment(SUBJECT)
        return ids

    def _settle_references(self) -> None:
        """Frees what is free, and sends what is to be sent."""
        references = self._references
        if not (references.freed or references.outgoing):
            return  # what another thread adds just now, that thread settles
        with self._lock:
            freed = [self._values.pop(i, None) for i in self._references.freed]
            self._references.freed.clear()
        if freed and not self._closed:
            # A value's finalizer is the user's code, so it runs in the pool.
            self.agent.run(freed.clear)
        self._send_outgoing()

    def _send_outgoing(self) -> None:
        with self._lock:
            outgoing, self._references.outgoing = self._references.outgoing, []
        packed: dict[int, list[bytes]] = {}
        for rank, word in outgoing:
            packed.setdefault(rank, []).append(word.pack())
        for rank, words in packed.items():
            for start in range(0, len(words), _MOST_IN_ONE):
                body = b"".join(words[start : start + _MOST_IN_ONE])
                self.agent.outbox.post(rank, Message(Kind.REFERENCE, body=body))


class _Creation:
    """Follows a call that makes a value elsewhere, or here.

    Args:
        layer: of the worker that calls.
        rref_id: the value's.
        fork_id: of this worker's fork; None at the owner.
        handle: see `RRefLayer.create`.
    """

    __slots__ = ("_fork_id", "_handle", "_holds", "_layer", "_rref_id")

    def __init__(
        self,
        layer: RRefLayer,
        rref_id: RRefId,
        fork_id: ForkId | None,
        handle: weakref.ref[Handle],
    ) -> None:
        self._layer = layer
        self._rref_id = rref_id
        self._fork_id = fork_id
        self._handle = handle
        self._holds = True  # the value, where it is made here; guarded by the layer's lock

    def release(self) -> None:
        """The call ends that makes a value here; counts once."""
        with self._layer._lock:
            held, self._holds = self._holds, False
        if held:
            self._layer.dropped.append((self._rref_id, None))

    def on_settled(self, call: PendingCall) -> None:
        """In the I/O thread, or in the one that calls."""
        outcome = call.claim()
        failed = isinstance(outcome, Exception)
        if self._fork_id is None:
            self.release()
        elif not failed:
            self._layer.created(self._fork_id)
        if failed and (handle := self._handle()) is not None:  # it may be gone by now
            handle.fail(outcome)


class _Keep:
    """Keeps the outcome of an execution as a value here, and tells the caller that it is there."""

    __slots__ = ("_layer", "_value", "request")

    def __init__(self, layer: RRefLayer, request: Message, value: OwnedValue) -> None:
        self._layer = layer
        self.request = request
        self._value = value

    def later(self) -> None:
        self._layer.agent.callee.requests.set_aside(self.request)

    def value(self, value: Any) -> None:
        self._value.set(value)
        self._layer.agent.callee.answer(self.request, None)

    def error(self, error: BaseException) -> None:
        self._layer.agent.callee.log_failure(error)
        self._value.set(error=error)
        self._layer.agent.callee.answer(self.request, None)


def layer_of(agent: Agent) -> RRefLayer:
    """The RRef layer of an agent."""
    return agent.layer(RRefLayer)


def _pack_ids(ids: list[GloballyUniqueId]) -> bytes:
    return b"".join(_ID.pack(*i) for i in ids)


def _unpack_ids(data: bytes) -> list[GloballyUniqueId]:
    return [GloballyUniqueId(*row) for row in _ID.iter_unpack(data)]

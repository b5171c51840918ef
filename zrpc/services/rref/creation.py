"""The call that makes the value of an RRef, on the worker that calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from typing_extensions import Unpack

from zrpc.calls.call_options import CallOptions
from zrpc.calls.pending_call import PendingCall
from zrpc.constants import Seconds
from zrpc.errors import OwnerDied, RpcError, RpcTimeoutError, WorkerDied, raised_again
from zrpc.membership.worker_info import WorkerInfo
from zrpc.services.actors.order import CallOrder
from zrpc.services.rref.messages import ForkId, RRefId, pack_ids
from zrpc.services.rref.service import RRefService
from zrpc.services.rref.value import OwnedValue
from zrpc.wire.exceptions import load_exception
from zrpc.wire.kind import Kind, Tag
from zrpc.wire.message import Message


class _State(Enum):
    """How far a creation elsewhere has come. At the owner there is no fork, and nothing to note."""

    NEW = auto()
    SETTLED = auto()  # the call has an outcome; its message may have reached the owner
    REPORTED = auto()  # the owner was told that there will be no value
    TAKEN_BACK = auto()  # the message was not sent, and nobody has the fork


@dataclass(slots=True, eq=False)
class Creation:
    """Follows a call of this worker that makes a value, here or elsewhere.

    Attributes:
        service: this worker's.
        rref_id: the value.
        fork_id: this worker's fork; None if it is the owner.
        owner: the worker that makes the value.
        fail: tells the handle of an error of the call, if the handle still exists.
        failed: is called after that if the call or its answer was lost, or could not be read.
        state: guarded by the service's lock.
    """

    service: RRefService
    rref_id: RRefId
    fork_id: ForkId | None
    owner: WorkerInfo
    fail: weakref.WeakMethod[Callable[[Exception | Message], None]]
    failed: Callable[[], object] | None = None
    state: _State = _State.NEW

    def start(
        self,
        body: Any,
        timeout: Seconds,
        subject_id: RRefId | None,
        **options: Unpack[CallOptions],
    ) -> OwnedValue | None:
        """Sends the call; returns the value if this worker is the owner.

        If this raises, the handle is dropped already: its error may be kept without limit.

        Args:
            body: the function or the method's name, args and kwargs.
            timeout: of the call.
            subject_id: the value whose method is called; None for a function.
            **options: see `CallOptions`.
        """
        # The owner has no fork, but the message has room for one.
        ids = [self.rref_id, self.fork_id or self.rref_id]
        if subject_id is not None:
            ids.append(subject_id)
        options["extension"] = Tag.SUBJECT, pack_ids(ids)
        try:
            value = self._count()
            self.service.caller.call_notify(
                self.owner,
                Kind.REMOTE,
                body,
                timeout,
                self,
                self.on_not_made,
                **options,
            )
        except BaseException:
            self._take_back()
            raise
        return value

    def _count(self) -> OwnedValue | None:
        if self.fork_id is None:
            return self.service.retain_value(self.rref_id)
        with self.service.lock:
            owner = self.owner.member_id
            self.service.references.create(self.rref_id, self.fork_id, owner)
        return None

    def _take_back(self) -> None:
        """Undoes `start`, which has failed."""
        for call in self.service.caller.calls.in_flight():
            if call.follower is self:  # Ctrl-C came as soon as it was sent
                call.cancel()
        if self.fork_id is not None:
            with self.service.lock:
                if self.state is _State.NEW:  # else the owner hears of the fork, then of its end
                    self.state = _State.TAKEN_BACK
                    self.service.references.cancel_create(self.fork_id)
        self.service.dropped.append((self.rref_id, self.fork_id))

    def on_settled(self, call: PendingCall) -> None:
        """Takes the call's outcome; in the I/O thread, or in the thread that calls.

        May be called again, unless it has claimed the outcome.
        """
        [outcome] = call.outcome
        # What the function raises belongs to the value: if the answer is an error, the owner could
        # not read the message.
        unread = isinstance(outcome, Message) and outcome.kind == Kind.ERROR
        # If it is the answer that is lost, the owner has a value already, which stays.
        lost = unread or type(outcome) is RpcError
        failed = unread or isinstance(outcome, Exception)
        if self.fork_id is not None:
            with self.service.lock:
                if self.state is _State.NEW:
                    self.state = _State.SETTLED
                if not failed:
                    self.service.references.on_listed(self.fork_id)
            if lost:
                self.on_not_made()
                self.service.settle_references()
        if failed and (fail := self.fail()) is not None:
            fail(outcome)
        if lost and self.failed is not None:
            self.failed()
        call.claim()

    def on_not_made(self) -> None:
        """Notes that the message never reaches the owner; may be called again.

        Others may have a fork by now. So the owner is told, once, that there will be no value: not
        here, since there may be no memory for a message.
        """
        if self.fork_id is None:
            return
        with self.service.lock:
            if self.state not in (_State.REPORTED, _State.TAKEN_BACK):
                self.state = _State.REPORTED
                references = self.service.references
                references.on_not_made(self.rref_id, self.fork_id, self.owner.member_id)


def error_of_creation(failure: Exception | Message, order: CallOrder | None) -> Exception:
    """Returns the error to raise when the call that was to make a value has failed.

    Args:
        failure: its error.
        order: of an actor.
    """
    error: RpcError
    if isinstance(failure, RpcTimeoutError):
        what = "" if order is None else f", for the actor {order.label}"
        error = RpcTimeoutError(f"RRef creation via rpc.remote() timed out{what}: {failure}")
    elif isinstance(failure, WorkerDied):
        error = OwnerDied(*failure.args) if order is None else order.died(str(failure))
    elif isinstance(failure, Message):
        return load_exception(failure.body)
    else:
        return raised_again(failure)
    error.executed = failure.executed
    return error

"""The call that makes the value of an RRef, at the worker that calls and at the owner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zrpc.errors import raised_by_function
from zrpc.wire.kind import Kind
from zrpc.wire.message import Message

if TYPE_CHECKING:
    import weakref

    from zrpc.calls.callee import Callee
    from zrpc.calls.pending_call import PendingCall
    from zrpc.services.rref.messages import ForkId, RRefId
    from zrpc.services.rref.rref import RRef
    from zrpc.services.rref.service import RRefService
    from zrpc.services.rref.value import OwnedValue
    from zrpc.wire.member_id import MemberId

__all__ = ["Creation", "ValueSink"]


@dataclass(slots=True, eq=False)
class Creation:
    """Follows a call of this worker that makes a value, here or elsewhere.

    The fork is this worker's; the owner has none. For the handle see `RRefService.create`.
    ``retains`` tells whether the call still counts as a handle of a value that is made here, and
    ``reported`` whether the owner was told that it never makes the value; both are guarded by the
    service's lock. ``settled`` tells whether the call has an outcome, ``unmade`` whether its
    message never came to the owner, and ``issued`` whether the fork counts all the same.
    """

    service: RRefService
    rref_id: RRefId
    fork_id: ForkId | None
    handle: weakref.ref[RRef[Any]]
    owner: MemberId
    retains: bool = False
    reported: bool = False
    unmade: bool = False
    issued: bool = False
    settled: bool = False

    def on_settled(self, call: PendingCall) -> None:
        """Takes the call's outcome; in the I/O thread, or in the thread that calls."""
        self.settled = True
        outcome = call.claim()
        # What the function raises belongs to the value: if the answer is an error, the owner could
        # not read the message.
        unread = isinstance(outcome, Message) and outcome.kind == Kind.ERROR
        failed = unread or isinstance(outcome, Exception)
        if self.fork_id is None:
            self.service.release_creation(self)
        elif not failed:
            self.service.on_created(self.fork_id)
        elif unread:
            self.on_not_made()
        if failed and (handle := self.handle()) is not None:  # it may be gone by now
            handle.fail(outcome)

    def on_not_made(self) -> None:
        """Learns that the message never comes to the owner."""
        if self.fork_id is not None:
            self.service.on_not_made(self)


@dataclass(slots=True, eq=False)
class ValueSink:
    """Keeps the outcome of an execution as a value here, and answers the caller without it."""

    _callee: Callee
    request: Message
    _value: OwnedValue

    def defer(self) -> None:
        """Notes that the outcome comes later."""
        self._callee.sink_for(self.request).defer()

    def value(self, value: Any) -> None:
        """Takes what the function has returned."""
        self._callee.count(self.request)  # before anyone has the value
        self._value.set(value)
        self._callee.answer(self.request, None)

    def error(self, error: BaseException) -> None:
        """Takes what the function has raised."""
        try:
            self._callee.report_failure(error)
        finally:  # also if it can't be logged
            self._callee.count(self.request, error)
            called = self.request.scope.function is not None
            self._value.set(error=raised_by_function(error) if called else error)
            self._callee.answer(self.request, None)

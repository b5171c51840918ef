"""A call that makes the value of an RRef, followed by its caller and by the value's owner.

If a program asks for the value, that is a second call (FETCH). It need not be sent if the answer to
the first one brings the value. But ``to_here`` must not return a value that is older than its
call, and a value may change at its owner at any time. So the answer brings a value only if nothing
can change it but this RRef: see ``zrpc/services/rref/sole.py``. And the caller uses it for the
first ``to_here`` only, if the RRef was neither sent to others before nor used to call a method.

Few programs ask for all the values that they have made. So an answer brings the value only if the
caller says that it wants it (WANTED). It does so for a function if it has asked for a value of it,
until one of its values can't be brought.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from zrpc.calls.codec import NONE
from zrpc.services.rref.sole import is_sole
from zrpc.wire.kind import Kind
from zrpc.wire.message import Message

if TYPE_CHECKING:
    import weakref

    from zrpc.calls.callee import Callee
    from zrpc.calls.pending_calls import PendingCall
    from zrpc.services.rref.messages import ForkId, RRefId
    from zrpc.services.rref.rref import RRef
    from zrpc.services.rref.service import RRefService
    from zrpc.services.rref.value import OwnedValue

__all__ = ["Creation", "ValueSink", "WantedValues"]

# The names of functions that are remembered. If there are more, all are forgotten.
_MAX_NAMES = 1024


class WantedValues:
    """Which functions make values that this worker asks for. Any thread may call its methods."""

    def __init__(self) -> None:
        # Single operations on the dict are atomic. False: the owner could not bring a value.
        self._by_name: dict[str, bool] = {}

    def __contains__(self, name: str) -> bool:
        return self._by_name.get(name, False)

    def note_asked(self, name: str) -> None:
        """Notes that the program has asked for a value."""
        if len(self._by_name) >= _MAX_NAMES:
            self._by_name.clear()
        self._by_name.setdefault(name, True)

    def note_not_brought(self, name: str) -> None:
        """Notes that a value did not come with the answer, though it was wanted."""
        self._by_name[name] = False


@dataclass(slots=True, eq=False)
class Creation:
    """Follows a call of this worker that makes a value, here or elsewhere.

    The fork is this worker's; the owner has none. For the handle see `RRefService.create`.
    ``retains`` tells whether the call still counts as a handle of a value that is made here; it is
    guarded by the service's lock.

    Attributes:
        name: what is called.
        wanted: whether the answer should bring the value.
    """

    service: RRefService
    rref_id: RRefId
    fork_id: ForkId | None
    handle: weakref.ref[RRef[Any]]
    name: str
    wanted: bool
    retains: bool = True
    _settled: bool = False
    # The answer, if it has brought the value and that was not taken.
    _answer: Message | None = None
    # The FETCH that the answer is to settle. One thread takes it out, as `list.pop` is atomic.
    _fetch: list[tuple[PendingCall, Message]] = field(default_factory=list)

    def on_settled(self, call: PendingCall) -> None:
        """Takes the call's outcome; in the I/O thread, or in the thread that calls."""
        outcome = call.claim()
        failed = isinstance(outcome, Exception)
        if self.fork_id is None:
            self.service.release_creation(self)
        elif not failed:
            self.service.on_created(self.fork_id)
        if failed and (handle := self.handle()) is not None:  # it may be gone by now
            handle.fail(outcome)
        if self.wanted:
            self._keep(outcome)

    def _keep(self, outcome: Any) -> None:
        if type(outcome) is Message and outcome.kind == Kind.RESULT and outcome.body != NONE:
            self._answer = outcome
        else:
            self.service.wanted.note_not_brought(self.name)
        self._settled = True  # first this, then the look at the fetch; `settle_fetch` reverses it
        self._end_fetch()

    def may_settle_fetch(self) -> bool:
        """Returns whether `settle_fetch` may be called; notes that the value is asked for."""
        if not self.wanted:
            self.service.wanted.note_asked(self.name)
        return self.wanted and not self.service.agent.codec.in_context(None)

    def settle_fetch(self, call: PendingCall, message: Message) -> None:
        """Settles a FETCH with the value that the answer brings; sends it if there is none.

        If there is no answer yet, that does it when it arrives. Call it once, in any thread.
        """
        self._fetch.append((call, message))
        if self._settled:
            self._end_fetch()

    def _end_fetch(self) -> None:
        try:
            call, message = self._fetch.pop()
        except IndexError:  # there is none, or another thread has taken it
            return
        answer, self._answer = self._answer, None
        if answer is None:
            self.service.caller.issue_later(call, message)
        else:
            answer.call_id = call.call_id
            self.service.caller.on_answer(answer)


@dataclass(slots=True, eq=False)
class ValueSink:
    """Keeps the outcome of an execution as a value here.

    It answers the caller with the value if that is wanted and nothing else can change it, otherwise
    without.
    """

    _callee: Callee
    request: Message
    _value: OwnedValue
    _wanted: bool

    def defer(self) -> None:
        """Notes that the outcome comes later."""
        self._callee.sink_for(self.request).defer()

    def value(self, value: Any) -> None:
        """Takes what the function has returned."""
        # Those of this frame and of `Execution`, and others if there are any.
        references = sys.getrefcount(value)
        brings = self._wanted and is_sole(value, references)
        self._value.set(value)
        self._callee.answer(self.request, value if brings else None)

    def error(self, error: BaseException) -> None:
        """Takes what the function has raised."""
        self._callee.report_failure(error)
        self._callee.count(self.request, error)
        self._value.set(error=error)
        self._callee.answer(self.request, None)

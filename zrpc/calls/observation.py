"""What watches a call while it is made: torch's profiler, traces, and OpenTelemetry.

A call asks three questions, each a few nanoseconds: is a profiler active, does this worker record a
trace, has the program imported OpenTelemetry? If so, it has a `CallObservation`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

import torch
from torch.autograd import profiler

from zrpc.calls.cancel_scope import current_scope
from zrpc.calls.function_names import call_title, function_of, kind_name, name_of
from zrpc.calls.open_telemetry import CallSpan, configured
from zrpc.calls.pending_call import PendingCall
from zrpc.calls.recorder import NO_PARENT, CallRecord, Recorder
from zrpc.wire.kind import METERED, Kind, Tag
from zrpc.wire.message import Message


def handler_profile(request: Message, caller: str, callee: str) -> Any:
    """Returns a context manager that shows the handler of a request in torch's profiler."""
    what = function_of(request) or kind_name(request.kind)
    return torch.profiler.record_function(f"rpc_handler#{what}({caller} -> {callee})")


class CallObservation:
    """Watches one call, from before it is packed. Used by the thread that calls.

    Args:
        recorder: records the call while a trace is on; else None.
        kind: of its request.
        body: what is packed.
        ends: the names of the caller and of the callee.
        waits: whether the thread waits for the answer at once.
        complete: runs a job in another thread.
    """

    def __init__(
        self,
        recorder: Recorder | None,
        kind: Kind,
        body: Any,
        ends: tuple[str, str],
        waits: bool,
        complete: Callable[[Callable[[], None]], None],
    ) -> None:
        self._recorder = recorder
        self._to = ends[1]
        self._waits = waits
        self._complete = complete
        self._span: CallSpan | None = None
        self._profile: Any = None
        if profiler._is_profiler_enabled:
            title = call_title(kind, name_of(body), waits, *ends)
            self._profile = torch.profiler.record_function(title)
            self._profile.__enter__()
        self._call: PendingCall | None = None
        # What is noted for the `CallRecord`.
        self._packing = monotonic()
        self._sending = self._left = 0.0
        self._size, self._shared = 0, False
        self._thread = threading.get_ident()
        scope = current_scope()
        self._parent = NO_PARENT if scope is None else (scope.caller.member_id, scope.call_id)
        self._settled: tuple[float, bool, int, bool] = (0.0, True, 0, False)

    def packed(self, call: PendingCall, message: Message) -> None:
        """Notes the size of the message, and adds a trace context to it."""
        self._call = call
        self._size = message.nbytes
        if message.kind in METERED and configured():
            self._span = CallSpan(call, message, self._to, self._complete)

    def sending(self) -> None:
        """Notes that there is room for the message now."""
        self._sending = monotonic()

    def sent(self, message: Message) -> None:
        """Notes that the message has left."""
        self._left = monotonic()
        self._shared = any(tag == Tag.SHARED for tag, _ in message.extensions)

    def on_settled(self, call: PendingCall, outcome: Any, failed: bool, now: float) -> None:
        """Notes the outcome, in the thread that settles the call."""
        size, shared = 0, False
        if type(outcome) is Message:
            size, shared = outcome.nbytes, Tag.SHARED in (outcome.attachments or ())
        self._settled = (now, failed, size, shared)
        if not self._waits:
            self._record(call, now)
        if self._span is not None:
            self._span.on_settled(outcome, failed)

    def end(self) -> None:
        """Notes that the thread goes on."""
        if self._waits and self._call is not None:
            self._record(self._call, monotonic())
        if self._profile is not None:
            self._profile.__exit__(None, None, None)

    def _record(self, call: PendingCall, done: float) -> None:
        if self._recorder is None:
            return
        settled, failed, size, shared = self._settled
        settled = settled or done  # it was never entered into the table
        self._recorder.add(
            CallRecord,
            (
                call.what,
                call.kind,
                call.peer,
                call.call_id,
                self._parent,
                self._thread,
                self._waits,
                self._packing,
                call.begun,
                self._sending,
                self._left or settled,  # the answer may come before the sender goes on
                settled,
                done,
                failed,
                self._size,
                self._shared,
                size,
                shared,
            ),
        )

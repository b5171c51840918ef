"""Spans of OpenTelemetry for calls and handlers, if the program has configured it.

zrpc itself never imports OpenTelemetry first. If the program has set a tracer provider, each call
of a function makes a client span. Its trace context travels in an extension of the request, and
the handler makes a server span that is a child of it. Names and attributes are those of the
semantic conventions for RPC.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from zrpc.calls.function_names import kind_name, readable
from zrpc.calls.message_hooks import MessageHooks
from zrpc.calls.pending_call import PendingCall
from zrpc.errors import ProtocolError
from zrpc.membership.view import Membership
from zrpc.wire.exceptions import error_text
from zrpc.wire.kind import METERED, Tag
from zrpc.wire.message import Message

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

logger = logging.getLogger(__name__)

API = "opentelemetry.trace"
_modules = sys.modules


def configured() -> bool:
    """Returns whether the program has set a tracer provider.

    The API's own function for that reads the environment each time, which takes a microsecond.
    """
    return API in _modules and getattr(_modules[API], "_TRACER_PROVIDER", None) is not None


def _tracer() -> Tracer:
    from opentelemetry import trace

    return trace.get_tracer("zrpc")


class CallSpan:
    """The client span of a call, from when it is packed to its outcome.

    Args:
        call: a call that is not sent yet.
        message: its request, which the trace context is added to.
        to: the name of the callee.
        complete: runs a job in another thread. What a program does at the end of a span may take
            long, and the I/O thread must not wait for it.
    """

    __slots__ = ("_complete", "_span")

    def __init__(
        self,
        call: PendingCall,
        message: Message,
        to: str,
        complete: Callable[[Callable[[], None]], None],
    ) -> None:
        from opentelemetry import propagate, trace

        self._complete = complete
        method = readable(call.what) or kind_name(message.kind)
        self._span = _tracer().start_span(
            method,
            kind=trace.SpanKind.CLIENT,
            attributes={"rpc.system": "zrpc", "rpc.method": method, "server.address": to},
        )
        carrier: dict[str, str] = {}
        propagate.inject(carrier, trace.set_span_in_context(self._span))
        extension = json.dumps([method, carrier]).encode()
        message.extensions = [*message.extensions, (Tag.TRACE_CONTEXT, extension)]

    def on_settled(self, outcome: Any, failed: bool) -> None:
        """The call has an outcome. In the thread that settles it."""
        error = None
        if failed:  # the message of a result may hold large tensors
            error = outcome.body if type(outcome) is Message else outcome
        self._complete(partial(self._end, error, time.time_ns()))

    def _end(self, error: Any, ended: int) -> None:
        if error is not None:
            what = repr(error) if isinstance(error, Exception) else error_text(error)
            _mark_failed(self._span, what.partition("(")[0], what)
        self._span.end(ended)


class HandlerSpan:
    """The server span of a request, from its arrival to the outcome of its handler.

    Args:
        extension: what `CallSpan` has added to the request.

    Raises:
        ProtocolError: it can't be read.
    """

    def __init__(self, extension: bytes) -> None:
        try:
            self._method, self._carrier = json.loads(bytes(extension))
        except (TypeError, ValueError):
            self._method, self._carrier = None, None
        if not (isinstance(self._method, str) and isinstance(self._carrier, dict)):
            raise ProtocolError("expected a name and a trace context, found something else")
        self._arrived = time.time_ns()
        self._span: Span | None = None

    def begin(self, caller: str, callee: str) -> Any:
        """Begins the span, and makes it current; returns a token for ``context.detach``."""
        from opentelemetry import context, propagate, trace

        self._span = _tracer().start_span(
            self._method,
            context=propagate.extract(self._carrier, context.Context()),
            kind=trace.SpanKind.SERVER,
            attributes={
                "rpc.system": "zrpc",
                "rpc.method": self._method,
                "server.address": callee,
                "client.address": caller,
            },
            start_time=self._arrived,
        )
        return context.attach(trace.set_span_in_context(self._span))

    def end(self, error: BaseException | None) -> None:
        """Ends the span, once, if it has begun. In the thread that answers the request."""
        span, self._span = self._span, None
        if span is None:
            return
        try:
            if error is not None:
                span.record_exception(error)
                _mark_failed(span, type(error).__name__, repr(error))
            span.end()
        except Exception:  # of the program's span processor; the caller waits for an answer
            logger.exception("A span of OpenTelemetry can't be ended")


class HandlerSpans(MessageHooks):
    """Runs the handlers of requests that carry a trace context within server spans."""

    tag = Tag.TRACE_CONTEXT

    def __init__(self, membership: Membership) -> None:
        self._name = membership.info.name

    def read(self, message: Message, extension: bytes) -> HandlerSpan | None:
        """Returns the span of a request; None if this worker makes none. In the I/O thread."""
        return HandlerSpan(extension) if message.kind in METERED and configured() else None

    @contextlib.contextmanager
    def request_scope(self, request: Message) -> Iterator[None]:
        """Runs a handler within its span."""
        span = (request.attachments or {}).get(self.tag)
        if span is None:  # or the request was dropped meanwhile; then its handler does not begin
            yield
            return
        from opentelemetry import context

        token = span.begin(request.scope.caller.name, self._name)
        try:
            yield
        finally:
            context.detach(token)


def _mark_failed(span: Span, kind: str, description: str) -> None:
    from opentelemetry.trace import StatusCode

    span.set_attribute("error.type", kind)
    span.set_status(StatusCode.ERROR, description)

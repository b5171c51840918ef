"""The callee's side of a worker: a request from its arrival to its answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any

from torch.autograd import profiler

from zrpc import stand_in
from zrpc.calls.call_counters import HandlerCount, Table
from zrpc.calls.codec import NONE, Codec
from zrpc.calls.execution import Execution, ExecutionWithin
from zrpc.calls.function_names import handler_name, name_of_function
from zrpc.calls.message_hooks import MessageHooks, overriding
from zrpc.calls.observation import handler_profile
from zrpc.calls.outbox import Outbox
from zrpc.calls.pending_requests import PendingRequests
from zrpc.calls.recorder import Recorder
from zrpc.calls.result_sink import Called, ResultSink
from zrpc.errors import was_not_executed
from zrpc.functions import Deferral
from zrpc.membership.view import Membership
from zrpc.runtime.event_loop import EventLoop
from zrpc.runtime.resource_limits import out_of_descriptors
from zrpc.runtime.thread_pool import HandlerPool
from zrpc.wire.devices import DeviceMap
from zrpc.wire.exceptions import dump_exception, traceback_of
from zrpc.wire.kind import Kind, Tag
from zrpc.wire.message import Extensions, Message

# The extensions of an answer to a request whose function was not called.
UNCALLED: Extensions = [(Tag.UNCALLED, b"")]
# Those if nothing was read of the request, not even its RRefs.
_UNREAD: Extensions = [(Tag.UNREAD, b"")]

logger = logging.getLogger(__name__)

RequestScope = Callable[[Message], AbstractContextManager[Any]]
WhenReady = Callable[[Message, Callable[[], None]], None]
# Takes over a call: the request, what takes its outcome, the mark, and function, args and kwargs.
TakeOver = Callable[[Message, ResultSink, Any, Called], None]


@dataclass(eq=False)
class Callee:
    """Answers the requests to one worker. Any thread may call its methods.

    Args:
        codec: unpacks requests, and packs answers.
        outbox: sends answers.
        pool: runs handlers.
        loop: runs ``async def`` handlers.
        run: runs a handler's job, in the pool or in the I/O thread.
        on_failure: called with the error of each handler that has failed, in its thread.

    Attributes:
        requests: the requests that are not answered yet.
        counts: of the requests that have run.
        recorder: records them while a trace is on; else None.
        deferrals: what takes over the calls of marked functions, by the type of the mark.
    """

    _membership: Membership
    _codec: Codec
    _outbox: Outbox
    _pool: HandlerPool
    _loop: EventLoop
    _run: Callable[[Callable[[], None]], None]
    _on_failure: Callable[[BaseException], None]

    def __post_init__(self) -> None:
        self.requests = PendingRequests(self._membership.infos)
        self.counts = Table(HandlerCount)
        self.recorder: Recorder | None = None
        self._scopes: dict[int, RequestScope] = {}
        self._ready: dict[int, WhenReady] = {}
        self.deferrals: dict[type[Deferral], TakeOver] = {}
        self._hooked: Set[int] = frozenset()  # the tags of both

    def use(self, hooks: Sequence[MessageHooks]) -> None:
        """Runs handlers within the scopes of these hooks, once they are ready for them.

        Only before the agent serves.
        """
        waiting = overriding(MessageHooks, "when_ready", hooks)
        self._ready = {each.tag: each.when_ready for each in waiting if each.tag is not None}
        scoped = overriding(MessageHooks, "request_scope", hooks)
        self._scopes = {each.tag: each.request_scope for each in scoped if each.tag is not None}
        self._hooked = self._ready.keys() | self._scopes.keys()

    def on_call(
        self,
        request: Message,
        sink: ResultSink | None = None,
        resolve: Callable[[], Called] | None = None,
    ) -> None:
        """Runs the function that a request asks for, in the pool. In the I/O thread.

        Args:
            request: the request.
            sink: takes the outcome; by default it is the answer.
            resolve: see `Execution`; by default the request is unpacked.
        """
        sink, resolve = sink or self, resolve or partial(self._codec.unpack, request)
        scope = request.scope or self.requests.accept(request)
        if scope.cancelled:
            return  # before it arrived, or while it waited for an RRef's value
        tags = request.attachments or ()
        if self._hooked.isdisjoint(tags) and not profiler._is_profiler_enabled:
            self._run(Execution(request, sink, resolve, self._loop, self._run))
            return
        begin = partial(self._run, self._execution_within(request, sink, resolve))
        for wait in [self._ready[tag] for tag in tags if tag in self._ready]:
            begin = partial(wait, request, begin)
        begin()

    def on_cancel(self, message: Message) -> None:
        """Cancels a request whose caller no longer waits for the answer. In the I/O thread."""
        self.requests.cancel(message.sender, message.call_id)

    def _execution_within(
        self, request: Message, sink: ResultSink, resolve: Callable[[], Called]
    ) -> Execution:
        """Returns the execution of a function, within the scopes of the request's extensions."""
        scopes = [self._scopes[tag] for tag in request.attachments or () if tag in self._scopes]
        if profiler._is_profiler_enabled:
            ends = request.scope.caller.name, self._membership.info.name
            scopes.append(lambda request: handler_profile(request, *ends))
        if not scopes:
            return Execution(request, sink, resolve, self._loop, self._run)
        within = ExecutionWithin(request, sink, resolve, self._loop, self._run)
        within.within = [partial(enter, request) for enter in scopes]
        return within

    def defer(self, request: Message) -> None:
        """Notes that a request's function has returned a future."""
        self.requests.defer(request)

    def hand_over(self, request: Message, first: ResultSink, mark: Deferral, call: Called) -> None:
        """Gives a call of a marked function to the service that gives its outcome later."""
        self.deferrals[type(mark)](request, first, mark, call)

    def answer(
        self,
        request: Message,
        value: Any,
        extension: tuple[int, bytes] | None = None,
        devices: DeviceMap | None = None,
    ) -> bool:
        """Answers a request with a value, or with an error if it can't be pickled.

        Args:
            request: the request.
            value: the value.
            extension: added to the answer.
            devices: where tensors arrive, if not by the device map of the caller.

        Returns:
            Whether the value was sent, as far as is known here.
        """
        if request.scope.cancelled:  # nobody waits for it
            self.count(request)
            self.requests.end(request)
            return False
        reply = Message(Kind.RESULT, request.call_id)
        encoder = None
        if value is not None or (request.attachments and self._codec.in_context(request)):
            encoder = self._codec.answer_encoder(request)
            if devices is not None:
                encoder.devices = devices
        try:
            if encoder is None:
                reply.body = NONE
            else:
                encoder.pack(value, reply)
            self.count(request)
            if extension is not None:
                reply.extensions = [*reply.extensions, extension]
            self._outbox.post(request.sender, reply)
        except BaseException as error:  # SystemExit too: the caller waits for an answer
            if encoder is not None:
                encoder.abort()
            self.answer_error(request, error)
            return False
        self.requests.end(request)
        return True

    def fail(
        self,
        request: Message,
        error: BaseException,
        report: bool = True,
        extensions: Extensions = (),
    ) -> None:
        """Answers a request whose function has failed, and logs the error."""
        # A handler that its caller has cancelled may fail of that: this needs no log and no answer.
        cancelled = request.scope.cancelled
        try:
            if report and not (cancelled and request.scope.has_caused(error)):
                self.report_failure(error, handler_name(request), told=not cancelled)
        finally:  # also if there is no memory for the log
            uncalled = request.scope.function is None and was_not_executed(error)
            self.answer_error(request, error, UNCALLED if uncalled else extensions)

    def refuse(self, request: Message, error: BaseException) -> None:
        """Answers a request whose function is never called."""
        self.answer_error(request, error, UNCALLED)

    def on_unreadable(self, request: Message, error: Exception) -> None:
        """Answers a request whose handler has failed. In the I/O thread."""
        read = request.attachments is not None or not request.extensions
        self.answer_error(request, error, () if read else _UNREAD)
        if request.scope is not None:
            request.scope.cancelled = True  # if it is queued nevertheless, it does not begin

    def on_lost(self, request: Message, error: Exception) -> None:
        """Answers a request if only its header arrived. In the I/O thread."""
        self.answer_error(request, error, _UNREAD)

    def answer_error(
        self, request: Message, error: BaseException, extensions: Extensions = ()
    ) -> None:
        """Answers a request with an error."""
        self.count(request, error)
        try:
            if request.scope is None or not request.scope.cancelled:
                same_main = self._membership.same_main[request.sender]
                in_graph = self._codec.in_context(request)
                body = dump_exception(error, repr(self._membership.info), same_main, in_graph)
                answer = Message(Kind.ERROR, request.call_id, body=body, extensions=extensions)
                self._outbox.post(request.sender, answer)
        finally:
            self.requests.end(request)
        if out_of_descriptors(error):
            self._outbox.retry_soon()

    def count(self, request: Message, error: BaseException | None = None) -> None:
        """Counts the execution of a request that has begun, once: before its caller is answered."""
        if request.attachments and (span := request.attachments.get(Tag.TRACE_CONTEXT)):
            span.end(error)
        scope = request.scope
        if scope is None or not scope.started:
            return
        started, scope.started = scope.started, 0.0
        function = scope.function
        counts = self.counts[request.kind if function is None else name_of_function(function)]
        now = monotonic()
        counts.add(started - scope.arrived, now - started, error is not None)
        if self.recorder is not None:
            self.recorder.on_handled(request, started, now, error is not None)

    def report_failure(self, error: BaseException, name: str, told: bool = False) -> None:
        """Logs that a function failed, and calls `on_failure`, unless this worker is closed.

        Args:
            error: what it has raised.
            name: the function's.
            told: whether its caller gets the error.
        """
        if self._outbox.closed:
            return
        # As text: a stored log record must not keep the handler's arguments alive.
        where = self._membership.info
        if not told or stand_in.is_active():  # torch prints all
            text = traceback_of(error).rstrip()
            logger.error("On %s: a call of %s failed\n%s", where, name, text)
        elif logger.isEnabledFor(logging.DEBUG):
            text = traceback_of(error).rstrip()
            logger.debug("On %s: a call of %s failed; its caller is told\n%s", where, name, text)
        self._on_failure(error)

    def drop_abandoned(self) -> None:
        """Drops requests from the pool's queue if their callers no longer wait."""
        if self.requests.expire(monotonic()):
            self._pool.discard(lambda job: isinstance(job, Execution) and job.useless)

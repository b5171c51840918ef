"""The callee's side of a worker: what becomes of a request until it is answered."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from zrpc.cancel_scope import CancelScope
from zrpc.codec import NONE, Codec
from zrpc.errors import RpcCancelledError
from zrpc.event_loop import EventLoop
from zrpc.execution import Execution, ExecutionWithin, Outlet
from zrpc.exhaustion import out_of_descriptors
from zrpc.membership import Membership
from zrpc.outbox import Outbox
from zrpc.pool import WorkerPool
from zrpc.requests import Requests
from zrpc.wire.exceptions import dump_exception
from zrpc.wire.header import Extensions, Message
from zrpc.wire.kind import Kind

__all__ = ["UNREAD", "Callee", "Scope"]

logger = logging.getLogger(__name__)

# The tag of the extension of an answer to a request that was lost on its way: nothing of it was
# read, and the references that it carried have not arrived.
UNREAD = 7

Scope = Callable[[Message], AbstractContextManager[Any]]


class Callee:
    """Answers the requests to one worker. All methods may be called from any thread.

    Args:
        membership: the worker's.
        codec: unpacks requests, and packs answers.
        outbox: sends answers.
        pool: runs handlers.
        loop: runs those that are ``async def``.
        run: has a handler's job run, in the pool or in the I/O thread.

    Attributes:
        requests: those that are not answered yet.
        scopes: by the tag of an attachment: what a layer gives to the handler of such a request.
    """

    def __init__(
        self,
        membership: Membership,
        codec: Codec,
        outbox: Outbox,
        pool: WorkerPool,
        loop: EventLoop,
        run: Callable[[Callable[[], None]], None],
    ) -> None:
        self._membership = membership
        self._codec = codec
        self._outbox = outbox
        self._pool = pool
        self._loop = loop
        self._run = run
        self.requests = Requests()
        self.scopes: dict[int, Scope] = {}

    def on_call(self, request: Message) -> None:
        """Takes in a request to run a function. In the I/O thread."""
        self.execute(request, self.answering(request), partial(self._codec.unpack, request))

    def on_cancel(self, message: Message) -> None:
        """Takes in the word that nobody waits for an answer any more. In the I/O thread."""
        self.requests.cancel(message.sender, message.call_id)

    def execute(
        self, request: Message, outlet: Outlet, resolve: Callable[[], tuple[Any, Any, Any]]
    ) -> None:
        """Runs a function for a request, in the pool; see `Execution`."""
        scope = request.scope or self.accept(request)
        if scope.cancelled:
            return  # before it came, or while it waited for an RRef's value
        scopes = [self.scopes[tag] for tag in request.attachments or () if tag in self.scopes]
        if scopes:
            within = ExecutionWithin(outlet, self._loop, self._run, scope, resolve)
            within.within = [partial(enter, request) for enter in scopes]
            self._run(within)
        else:
            self._run(Execution(outlet, self._loop, self._run, scope, resolve))

    def accept(self, request: Message) -> CancelScope:
        """Notes that a request will be answered: until then this worker is not idle."""
        return self.requests.accept(request, self._membership.infos[request.sender])

    def answering(self, request: Message) -> Outlet:
        """An outlet that answers the request with the function's outcome."""
        return _Answer(self, request)

    def answer(self, request: Message, value: Any) -> None:
        """Answers a request with a value, or with an error where it can't be pickled."""
        if request.scope.cancelled:  # nobody waits for it
            self.requests.end(request)
            return
        reply = Message(Kind.RESULT, request.call_id)
        encoder = None
        if value is not None or self._codec.in_context(request):
            encoder = self._codec.encoder(request.sender, request)
        try:
            if encoder is None:
                reply.body = NONE
            else:
                encoder.pack(value, reply)
            self._outbox.post(request.sender, reply)
        except BaseException as error:  # SystemExit too: the caller waits for an answer
            if encoder is not None:
                encoder.abort()
            self.answer_error(request, error)
            return
        self.requests.end(request)

    def answer_unread(self, request: Message, error: Exception) -> None:
        """Answers a request of which only the header has come."""
        self.answer_error(request, error, [(UNREAD, b"")])

    def answer_error(
        self, request: Message, error: BaseException, extensions: Extensions = ()
    ) -> None:
        """Answers a request with an error."""
        try:
            if request.scope is None or not request.scope.cancelled:
                same_main = self._membership.same_main(request.sender)
                body = dump_exception(error, repr(self._membership.info), same_main)
                answer = Message(Kind.ERROR, request.call_id, body=body, extensions=extensions)
                self._outbox.post(request.sender, answer)
        finally:
            self.requests.end(request)
        if out_of_descriptors(error):
            self._outbox.send_again_soon()

    def log_failure(self, error: BaseException) -> None:
        """Tells this worker's log that a handler failed, but not because of our own end."""
        if self._outbox.closed:
            return
        # As text: a log record that is kept must not keep the handler's arguments.
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        logger.error("On %s: a call failed\n%s", self._membership.info, text.rstrip())

    def drop_abandoned(self) -> None:
        """Takes requests out of the pool's queue for which nobody waits any more."""
        if self.requests.expire(time.monotonic()):
            self._pool.discard(lambda job: isinstance(job, Execution) and job.useless)


class _Answer:
    """Sends the outcome of an execution to the caller."""

    __slots__ = ("_callee", "request")

    def __init__(self, callee: Callee, request: Message) -> None:
        self._callee = callee
        self.request = request

    def later(self) -> None:
        self._callee.requests.set_aside(self.request)

    def value(self, value: Any) -> None:
        self._callee.answer(self.request, value)

    def error(self, error: BaseException) -> None:
        # Of the end of a call that it has cancelled, nobody needs to be told.
        expected = isinstance(error, (RpcCancelledError, asyncio.CancelledError))
        try:
            if not (expected and self.request.scope.cancelled):
                self._callee.log_failure(error)
        finally:  # there may be no memory for a log
            self._callee.answer_error(self.request, error)

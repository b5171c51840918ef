"""One batch: the calls of several callers that run as one, each with an outcome of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from typing import Any

from zrpc.batch_values import columns, rows
from zrpc.calls.cancel_scope import CancelScope
from zrpc.calls.current_device import device_of
from zrpc.calls.result_sink import Called, ResultSink
from zrpc.functions import Batching, Deferral
from zrpc.runtime.thread_errors import printing_errors
from zrpc.wire.exceptions import copied
from zrpc.wire.kind import Tag
from zrpc.wire.message import Message

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class BatchedCall:
    """A call that waits for its batch, or is in one.

    Attributes:
        request: the caller's.
        sink: takes its outcome.
        batching: how its function is batched.
        receiver: the object of the method, as a tuple; empty for a function.
        args, kwargs: its other arguments.
        context: what its handler runs in: the autograd context, for example.
    """

    request: Message
    sink: ResultSink
    batching: Batching
    receiver: tuple[Any, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    context: Context


class _BatchScope(CancelScope):
    """The scope in which a function runs for several callers: it ends when all have gone."""

    def __init__(self, scopes: Sequence[CancelScope]) -> None:
        super().__init__(scopes[0].caller, 0, any(scope.must_run for scope in scopes))
        self._scopes = scopes
        for scope in scopes:
            scope.when_cancelled(self._leave)

    @property
    def deadline(self) -> float:  # type: ignore[override]
        """The latest of the callers' deadlines, which a breakpoint may postpone."""
        return max(scope.deadline for scope in self._scopes)

    def _leave(self) -> None:
        if all(scope.cancelled for scope in self._scopes):
            self.cancel()


class Batch:
    """Calls a function for several callers, and gives each its outcome: a `ResultSink`.

    Args:
        request: becomes that of the batch, which no worker has sent.
        calls: those whose callers still wait; at least one.
        ended: called once all of them have their outcomes.
    """

    def __init__(
        self, request: Message, calls: Sequence[BatchedCall], ended: Callable[[], None]
    ) -> None:
        self._calls = calls
        self._ended = ended
        self.context = calls[0].context
        first = calls[0].request
        request.kind, request.sender, request.call_id = first.kind, first.sender, first.call_id
        request.attachments = {Tag.DEVICE: device_of(first)}
        request.scope = _BatchScope([call.request.scope for call in calls])
        request.scope.mailbox = first.scope.mailbox
        for call in calls:
            call.request.scope.batch = request

    def resolve(self) -> Called:
        """Returns the function, and the arguments of all calls; these let go of them."""
        first = self._calls[0]
        batching = first.batching
        calls = [(call.args, call.kwargs) for call in self._calls]
        args, kwargs = columns(calls, batching.stack, first.receiver)
        for call in self._calls:  # the shared memory that they hold is returned with the answers
            call.args, call.kwargs, call.receiver = (), {}, ()
        return batching.fn, args, kwargs

    def defer(self, request: Message) -> None:
        """Does nothing: the calls are deferred already."""

    def hand_over(self, request: Message, first: ResultSink, mark: Deferral, call: Called) -> None:
        """Refuses a function that is marked twice."""
        raise TypeError(f"expected a function that is marked once, found {call[0]!r}")

    def answer(self, request: Message, value: Any) -> None:
        """Takes what the function has returned: a result for each call."""
        batching = self._calls[0].batching
        try:
            found = rows(value, len(self._calls), batching.stack, batching.name)
        except BaseException as error:
            self.fail(request, error)
            return
        del value
        for call, row in zip(self._calls, found, strict=True):
            give = call.sink.fail if isinstance(row, BaseException) else call.sink.answer
            self._each(partial(give, call.request, row))
        self._ended()

    def fail(self, request: Message, error: BaseException, report: bool = True) -> None:
        """Takes what the function has raised, for all calls; it is logged once."""
        for call in self._calls:
            # A sink may change the error.
            own = error if report else copied(error, error.__cause__)
            self._each(partial(call.sink.fail, call.request, own, report))
            report = False
        self._ended()

    def refuse(self, request: Message, error: BaseException) -> None:
        """Takes the error of a batch that never begins, for all calls."""
        self.fail(request, error, False)

    def _each(self, give: Callable[[], None]) -> None:
        """Gives a call its outcome; whatever fails, the others get theirs."""
        try:
            give()
        except Exception:
            with printing_errors():
                logger.exception("a call of a batch was not answered")

"""Gathers the calls of batched functions on one worker, and runs them together."""

from __future__ import annotations

import contextvars
import time
from collections.abc import Hashable, Mapping
from functools import partial
from typing import Any

from typing_extensions import override

from zrpc.agent.agent import Agent
from zrpc.agent.service import Service
from zrpc.batch_values import form_of
from zrpc.calls.callee import TakeOver
from zrpc.calls.execution import Execution, ResultSink
from zrpc.errors import RpcCancelledError
from zrpc.functions import Batching, Deferral
from zrpc.runtime.interrupts import UninterruptedLock
from zrpc.services.batching.batch import Batch, BatchedCall
from zrpc.services.batching.gathering import Gathering
from zrpc.wire.message import Message

__all__ = ["BatchingService"]


class BatchingService(Service):
    """Plugs batches into an agent.

    A call that waits for its batch counts as one whose function has returned a future: it takes no
    thread, and a shutdown waits for it. How much waits is bounded by the flow control of the
    callers.
    """

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        # Guards what waits; no other lock is taken while it is held.
        self._lock = UninterruptedLock()
        self._gatherings: dict[Hashable, Gathering[BatchedCall]] = {}
        self._timed: set[Hashable] = set()  # those for which a timer runs

    @override
    def deferrals(self) -> Mapping[type[Deferral], TakeOver]:
        return {Batching: self._gather}

    def _gather(
        self, request: Message, sink: ResultSink, batching: Batching, call: tuple[Any, Any, Any]
    ) -> None:
        """Adds a call to those that wait; in the thread that has unpickled it."""
        function, args, kwargs = call
        bound = getattr(function, "__self__", None)
        receiver = batching.receiver(args) if bound is None else (bound,)
        args = args if bound is not None else args[len(receiver) :]
        form = form_of((args, kwargs), batching.stack)
        # An id is unique as long as the call that waits keeps the object.
        key = (batching.token, *map(id, receiver), form, self.agent.codec.contexts())
        context = contextvars.copy_context()
        waiting = BatchedCall(request, sink, batching, receiver, args, kwargs, context)
        request.scope.outcome_from = "its batch"
        sink.defer(request)
        with self._lock:
            gathering = self._gatherings.get(key)
            if gathering is None:
                gathering = Gathering(batching.max_size, batching.max_wait)
                self._gatherings[key] = gathering
            full = gathering.add(waiting, time.monotonic())
        request.scope.when_cancelled(partial(self._leave, key, waiting))
        if full:
            self.agent.receiver.run(partial(self._run, key, gathering))
        self._set_timer(key)

    def _set_timer(self, key: Hashable) -> None:
        """Starts a timer for the next run, unless one runs already."""
        with self._lock:
            gathering = self._gatherings.get(key)
            due = None if gathering is None else gathering.due()
            if due is None or key in self._timed:
                return
            self._timed.add(key)
        # There is no sooner one: calls are due in the order in which they came.
        delay = max(0.0, due - time.monotonic())
        self.agent.event_loop.call_later(delay, partial(self._look, key))

    def _look(self, key: Hashable) -> None:
        """Orders the runs that are due; in the event loop's thread."""
        with self._lock:
            self._timed.discard(key)
            gathering = self._gatherings.get(key)
            due = gathering is not None and gathering.expire(time.monotonic())
            self._tidy(key)
        if gathering is not None and due:
            self.agent.receiver.run(partial(self._run, key, gathering))
        self._set_timer(key)

    def _leave(self, key: Hashable, call: BatchedCall) -> None:
        """Removes a call whose caller no longer waits; mostly in the I/O thread."""
        with self._lock:
            if (gathering := self._gatherings.get(key)) is not None:
                gathering.remove(call)
                self._tidy(key)

    def _run(self, key: Hashable, gathering: Gathering[BatchedCall]) -> None:
        """Calls the function for those that wait; in a thread of the pool."""
        with self._lock:
            calls = gathering.take()
            self._tidy(key)
        live = []
        for call in calls:
            self.agent.callee.requests.resume(call.request)
            if call.request.scope.begin():
                live.append(call)
            else:
                gone = RpcCancelledError("the caller no longer waits for the answer")
                call.sink.fail(call.request, gone)
        if live:
            batch = Batch(live)
            agent = self.agent
            run = Execution(
                batch.request, batch, batch.resolve, agent.event_loop, agent.receiver.run
            )
            batch.context.run(run)

    def _tidy(self, key: Hashable) -> None:
        """Forgets a gathering in which nothing waits; the lock is held."""
        gathering = self._gatherings.get(key)
        if gathering is not None and gathering.idle and key not in self._timed:
            del self._gatherings[key]

    @override
    def close(self) -> None:
        with self._lock:
            self._gatherings.clear()

"""Gathers the calls of batched functions on one worker, and runs them together."""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

from typing_extensions import override

from zrpc.agent.agent import Agent
from zrpc.agent.service import Service
from zrpc.batch_values import form_of
from zrpc.calls.callee import TakeOver
from zrpc.calls.cancel_scope import CancelScope
from zrpc.calls.current_device import current_device, device_of
from zrpc.calls.execution import Execution
from zrpc.calls.result_sink import ResultSink
from zrpc.errors import RpcCancelledError
from zrpc.functions import Batching, Deferral
from zrpc.runtime.interrupts import UninterruptedLock
from zrpc.services.batching.batch import Batch, BatchedCall
from zrpc.services.batching.gathering import Gathering
from zrpc.wire.kind import Kind
from zrpc.wire.message import Message


class _Key(NamedTuple):
    """What is equal for calls that may be in one batch.

    Attributes:
        token: of the function.
        receiver: the id of the object of a method. It is unique while a call keeps the object.
        form: of the arguments.
        contexts: the autograd context, for example.
        method: the name of the function.
        mailbox: of the actor whose method it is; None if it is no actor's.
    """

    token: str
    receiver: tuple[int, ...]
    form: Hashable
    contexts: tuple[Any, ...]
    method: str
    mailbox: Any


class BatchingService(Service):
    """Plugs batches into an agent.

    A call that waits for its batch counts as one whose function has returned a future: it takes no
    thread, and a shutdown waits for it. How much waits is bounded by the flow control of the
    callers.

    In an actor, a run is one call: it waits in the mailbox for its turn. The calls that it takes
    have left the mailbox before.
    """

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        # Guards what waits; no other lock is taken while it is held.
        self._lock = UninterruptedLock()
        self._gatherings: dict[_Key, Gathering[BatchedCall]] = {}
        self._timed: set[_Key] = set()  # those for which a timer runs

    @override
    def deferrals(self) -> Mapping[type[Deferral], TakeOver]:
        return {Batching: self._gather}

    def _gather(
        self, request: Message, sink: ResultSink, batching: Batching, call: tuple[Any, Any, Any]
    ) -> None:
        """Adds a call to those that wait; in the thread that has unpickled it."""
        function, args, kwargs = call
        if not isinstance(function, MethodType):  # one of an actor may be wrapped
            wrapped = getattr(function, "__wrapped__", None)
            function = wrapped if isinstance(wrapped, MethodType) else function
        if isinstance(function, MethodType):
            receiver: tuple[Any, ...] = (function.__self__,)
        else:
            receiver = batching.receiver(args)
            args = args[len(receiver) :]
        form = form_of((args, kwargs), batching.stack)
        contexts, mailbox = self.agent.codec.contexts(), request.scope.mailbox
        name = getattr(batching.fn, "__name__", "")
        key = _Key(batching.token, tuple(map(id, receiver)), form, contexts, name, mailbox)
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
            self._order(key, gathering)
        self._set_timer(key)

    def _set_timer(self, key: _Key) -> None:
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

    def _look(self, key: _Key) -> None:
        """Orders the runs that are due; in the event loop's thread."""
        with self._lock:
            self._timed.discard(key)
            gathering = self._gatherings.get(key)
            due = gathering is not None and gathering.expire(time.monotonic())
            self._tidy(key)
        if gathering is not None and due:
            self._order(key, gathering)
        self._set_timer(key)

    def _leave(self, key: _Key, call: BatchedCall) -> None:
        """Removes a call whose caller no longer waits; mostly in the I/O thread."""
        with self._lock:
            if (gathering := self._gatherings.get(key)) is not None:
                gathering.remove(call)
                self._tidy(key)

    def _order(self, key: _Key, gathering: Gathering[BatchedCall]) -> None:
        """Starts a run when there is a thread for it, and in an actor when it is its turn."""
        run = self.agent.receiver.run
        if key.mailbox is None:
            run(partial(self._run, key, gathering, _nothing))
            return
        turn = Message(Kind.METHOD, sender=self.agent.worker_info.member_id)
        turn.scope = CancelScope(self.agent.worker_info, 0)
        begin = partial(run, partial(self._run_in_turn, key, gathering, turn))
        call = turn, begin, partial(self._refuse, key, gathering)
        key.mailbox.do(key.mailbox.arrive(call, method=key.method))

    def _run_in_turn(self, key: _Key, gathering: Gathering[BatchedCall], turn: Message) -> None:
        """Runs as one call of an actor; in a thread of the pool."""
        scope = turn.scope
        scope.begin()
        key.mailbox.do(key.mailbox.on_begun(scope))
        self._run(key, gathering, lambda: key.mailbox.do(key.mailbox.end(scope)), turn)

    def _run(
        self,
        key: _Key,
        gathering: Gathering[BatchedCall],
        ended: Callable[[], None],
        turn: Message | None = None,
    ) -> None:
        """Calls the function for those that wait; in a thread of the pool."""
        live = []
        for call in self._take(key, gathering):
            if call.request.scope.begin():
                live.append(call)
            else:
                gone = RpcCancelledError("the caller no longer waits for the answer")
                call.sink.fail(call.request, gone)
        if not live:
            ended()
            return
        batch = Batch(live, ended)
        if turn is not None:  # the mailbox shows this one as what runs
            turn.sender, turn.call_id = batch.request.sender, batch.request.call_id
            turn.scope = batch.request.scope
        loop, run = self.agent.event_loop, self.agent.receiver.run
        with current_device(device_of(batch.request)):
            batch.context.run(Execution(batch.request, batch, batch.resolve, loop, run))

    def _refuse(self, key: _Key, gathering: Gathering[BatchedCall], error: BaseException) -> None:
        """Refuses those that wait: the actor is stopped, or its mailbox full."""
        for call in self._take(key, gathering):
            call.sink.refuse(call.request, error)

    def _take(self, key: _Key, gathering: Gathering[BatchedCall]) -> list[BatchedCall]:
        with self._lock:
            calls = gathering.take()
            self._tidy(key)
        for call in calls:
            self.agent.callee.requests.resume(call.request)
        return calls

    def _tidy(self, key: _Key) -> None:
        """Forgets a gathering in which nothing waits; the lock is held."""
        gathering = self._gatherings.get(key)
        if gathering is not None and gathering.idle and key not in self._timed:
            del self._gatherings[key]

    @override
    def tick(self) -> None:
        """Refuses the calls that wait for a batch of an actor which was stopped."""
        with self._lock:
            stopped = [
                (key, gathering)
                for key, gathering in self._gatherings.items()
                if key.mailbox is not None and key.mailbox.stopped is not None
            ]
            runs = [each for each in stopped for _ in range(each[1].order_all())]
        for key, gathering in runs:
            self._order(key, gathering)

    @override
    def close(self) -> None:
        with self._lock:
            self._gatherings.clear()


def _nothing() -> None:
    """What is done at the end of a run of no actor."""
